"""Let AIPerf send requests, and read what it exports of each."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import ROOT
from benchmarks.harness.server import MODEL_NAME, Server
from benchmarks.serve.client import RoundFailed, answer_of, round_from
from benchmarks.serve.workloads import SIDE, Client, schedule
from dev.child_process import ChildProcess

ENVIRONMENT = ROOT / ".venv-aiperf"
LOCK = ROOT / "dev" / "locks" / "aiperf.txt"
PATIENCE_SECONDS = 180.0  # beyond the arrivals: AIPerf starts a dozen processes, and waits for the last answer


def program(environment: Path = ENVIRONMENT) -> Path:
    """Return the program of AIPerf.

    Raises:
        SystemExit: its environment has not been built.
    """
    found = environment / "bin" / "aiperf"
    if not found.is_file():
        raise SystemExit(
            f"there is no AIPerf in {environment.name}: build it with `make bench-aiperf`, or with "
            f"`python3.11 dev/bootstrap.py {ENVIRONMENT.name}`"
        )
    return found


class AiperfClient:
    """Runs `aiperf profile` for each round.

    A client alone that makes its own requests has those of AIPerf: its text and pictures, at times that it draws. Any
    other workload is written to a file, with the times of its requests. Those of two clients are in one file, because
    processes that start apart would not meet in the same way on each server.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self._program = program()
        self._model = model
        self._folder = folder
        self._rounds = 0
        (pin,) = (line for line in LOCK.read_text().splitlines() if line.startswith("aiperf=="))
        self.title = pin.replace("==", " ")

    def send(
        self, server: Server, clients: Sequence[Client], *, load: float, seconds: float, seed: int
    ) -> dict[str, Any]:
        """Let AIPerf send all requests; return them as `benchmarks.mixed` records those of a round.

        Raises:
            RoundFailed: it failed or did not end, or none of the requests was answered.
        """
        self._rounds += 1
        folder = self._folder / f"aiperf-{self._rounds}"
        folder.mkdir()
        words, kinds = arguments(clients, folder, load, seconds, seed)
        command = [str(self._program), "profile", "--url", server.url, "--tokenizer", str(self._model), *words]
        # Offline mode would take the folder of the tokenizer for a name of the hub.
        environment = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}
        with ChildProcess(command, log=ROOT / ".logs" / "serve-aiperf.log", env=environment) as child:
            until = time.monotonic() + seconds + PATIENCE_SECONDS
            while child.exit_code is None and time.monotonic() < until:
                time.sleep(0.2)
            ended = child.exit_code
        if ended != 0:
            how = "did not end" if ended is None else f"ended with status {ended}"
            raise RoundFailed(f"aiperf {how}: {' '.join(child.last_lines(3))}")
        return read_export(folder, kinds)


def arguments(
    clients: Sequence[Client], folder: Path, load: float, seconds: float, seed: int
) -> tuple[list[str], list[str]]:
    """Return the arguments of `aiperf profile` for a workload, and the kind of each of its requests."""
    words = ["--model", MODEL_NAME, "--endpoint-type", "chat", "--streaming", "--random-seed", str(seed)]
    words += ["--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
    words += ["--export-level", "records", "--export-outputs-json", "--artifact-dir", str(folder)]
    words += ["--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"]
    words += ["--workers-max", "1", "--record-processors", "1"]
    if len(clients) == 1 and clients[0].prompts is None:
        (client,) = clients
        number = max(1, round(client.rate * load * seconds))
        words += ["--request-rate", str(client.rate * load), "--arrival-pattern", "gamma"]
        words += ["--arrival-smoothness", str(client.burstiness), "--request-count", str(number)]
        words += ["--num-dataset-entries", str(number), "--isl", str(client.tokens), "--isl-stddev", "0"]
        words += ["--osl", str(client.output_tokens), "--osl-stddev", "0"]
        if client.kind == "image":
            words += ["--image-batch-size", str(sum(client.pictures) // 2), "--image-format", "png"]
            for side in ("width", "height"):
                words += [f"--image-{side}-mean", str(SIDE), f"--image-{side}-stddev", "0"]
        return words, [client.kind] * number
    lines, kinds = [], []
    for at, prompt in schedule(clients, load, seconds, seed):
        lines.append(
            {
                "timestamp": round(at * 1e3, 3),
                "texts": [prompt.text],
                "images": list(prompt.pictures),
                "output_length": prompt.output_tokens,
            }
        )
        kinds.append("image" if prompt.pictures else "text")
    file = folder / "requests.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words += ["--input-file", str(file), "--custom-dataset-type", "single_turn", "--fixed-schedule"]
    return words, kinds


def read_export(folder: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the requests of a folder of AIPerf's exports, with the kinds of its dataset.

    A request is numbered by its place in the dataset (`inputs.json`). Its times are in `profile_export.jsonl`, its text
    is in `outputs.json`.

    Raises:
        RoundFailed: a file is missing, the number of requests differs from that of the kinds, or none was answered.
    """
    try:
        inputs = json.loads((folder / "inputs.json").read_text())["data"]
        lines = (folder / "profile_export.jsonl").read_text().splitlines()
        outputs = json.loads((folder / "outputs.json").read_text())["data"]
    except (OSError, KeyError) as error:
        raise RoundFailed(f"AIPerf has not exported all of its results: {error}") from None
    numbers = {session["session_id"]: number for number, session in enumerate(inputs)}
    texts = {output["x_request_id"]: output["response_text"] or "" for output in outputs}
    records = [record for record in map(json.loads, lines) if record["metadata"]["benchmark_phase"] == "profiling"]
    if sorted(numbers[record["metadata"]["conversation_id"]] for record in records) != list(range(len(kinds))):
        raise RoundFailed(f"AIPerf has records of {len(records)} requests, and was to send {len(kinds)}, each once")
    found, failed = [], []
    for record in records:
        about, measured = record["metadata"], record["metrics"]
        number = numbers[about["conversation_id"]]
        if record.get("error"):
            error = record["error"]
            failed.append({"kind": kinds[number], "number": number, "error": f"{error['type']}: {error['message']}"})
            continue
        found.append(
            answer_of(
                kinds[number],
                number,
                about["request_start_ns"] / 1e9,
                _value(measured, "time_to_first_token") / 1e3,
                [gap / 1e3 for gap in measured.get("inter_chunk_latency", {"value": ()})["value"]],
                int(_value(measured, "output_sequence_length")),
                texts.get(about["x_request_id"], ""),
            )
        )
    return round_from(sorted(found, key=lambda request: int(request["number"])), failed)


def _value(metrics: Mapping[str, Any], name: str) -> float:
    return float(metrics[name]["value"])

"""Run `vllm bench serve`, and read what it has written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import ROOT
from benchmarks.harness.server import MODEL_NAME, Server
from benchmarks.serve.workloads import Client
from dev.child_process import ChildProcess


def send(
    server: Server,
    clients: Sequence[Client],
    folder: Path,
    *,
    python: str,
    model: Path,
    load: float,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    """Start all clients at once; return their requests as `benchmarks.mixed` records those of a round.

    Raises:
        SystemExit: a client failed, or one of its requests.
    """
    running = []
    with ExitStack() as stack:
        for number, client in enumerate(clients):
            requests = max(1, round(client.rate * load * seconds))
            file = folder / f"client-{number}.json"
            file.unlink(missing_ok=True)
            command = [str(Path(python).with_name("vllm")), "bench", "serve", "--backend", "openai-chat"]
            command += ["--endpoint", "/v1/chat/completions", "--host", "127.0.0.1", "--port", str(server.port)]
            command += ["--model", MODEL_NAME, "--tokenizer", str(model), "--temperature", "0", "--ignore-eos"]
            command += ["--request-rate", str(client.rate * load), "--burstiness", str(client.burstiness)]
            command += ["--num-prompts", str(requests), "--seed", str(seed), "--disable-tqdm"]
            command += ["--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", file.name]
            command += client.arguments(folder, requests, seed)
            process = ChildProcess(
                command,
                log=ROOT / ".logs" / f"bench-serve-{number}.log",
                env={"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""},
            )
            running.append((stack.enter_context(process), file, client.kinds(requests, seed)))
        found = []
        for process, file, kinds in running:
            if process.wait() or not file.exists():
                raise SystemExit("vllm bench serve failed:\n" + "\n".join(process.last_lines(25)))
            found += requests_of(json.loads(file.read_text()), kinds)
    began = min(request["at"] for request in found)
    end = max(request["at"] + request["ttft"] + sum(request["gaps"]) for request in found)
    return {"requests": found, "seconds": end - began}


def requests_of(result: Mapping[str, Any], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the requests in a detailed result of `vllm bench serve`; times in seconds of the machine's clock.

    Raises:
        SystemExit: a request failed.
    """
    columns = zip(
        kinds,
        *(result[name] for name in ("start_times", "ttfts", "itls", "output_lens", "generated_texts", "errors")),
        strict=True,
    )
    found = []
    for kind, at, ttft, gaps, tokens, text, error in columns:
        if error:
            raise SystemExit(f"a request of vllm bench serve failed: {error.strip()}")
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        found.append({"kind": kind, "at": at, "ttft": ttft, "gaps": gaps, "tokens": tokens, "digest": digest})
    return found

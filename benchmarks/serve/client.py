"""Let `vllm bench serve` send its requests, and read what it has written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.harness.child import Child, ChildFailed
from benchmarks.harness.server import MODEL_NAME, Server
from benchmarks.serve.workloads import Client, bench_arguments


class RoundFailed(RuntimeError):
    """A round has no result: a client failed, or none of its requests was answered."""


class BenchClients:
    """Processes of `vllm bench serve` that are up until the stack is left, one for each client of a workload.

    Args:
        python: interpreter whose vLLM is the client.
        number: how many clients may send at the same time.
    """

    title = "vllm bench serve"

    def __init__(self, stack: ExitStack, python: str, model: Path, folder: Path, number: int) -> None:
        self._model = model
        self._folder = folder
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""}
        self._children = [
            stack.enter_context(Child("benchmarks.serve.bench", python=python, environment=environment))
            for _ in range(number)
        ]
        for child in self._children:
            child.next_event()

    def send(
        self, server: Server, clients: Sequence[Client], *, load: float, seconds: float, seed: int
    ) -> dict[str, Any]:
        """Let all clients send at once; return their requests as `benchmarks.mixed` records those of a round.

        Raises:
            RoundFailed: a client failed, or none of all requests was answered.
        """
        sent = []
        for number, (child, client) in enumerate(zip(self._children, clients, strict=False)):
            requests = max(1, round(client.rate * load * seconds))
            file = self._folder / f"client-{number}.json"
            file.unlink(missing_ok=True)
            words = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
            words += ["--host", "127.0.0.1", "--port", str(server.port)]
            words += ["--model", MODEL_NAME, "--tokenizer", str(self._model), "--temperature", "0", "--ignore-eos"]
            words += ["--request-rate", str(client.rate * load), "--burstiness", str(client.burstiness)]
            words += ["--num-prompts", str(requests), "--seed", str(seed), "--disable-tqdm"]
            words += ["--save-result", "--save-detailed", "--result-dir", str(self._folder)]
            words += ["--result-filename", file.name, *bench_arguments(client, self._folder, requests, seed)]
            sent.append((child, words, file, client.kinds(requests, seed)))
        for child, words, *_ in sent:
            child.tell(arguments=words)
        said = [self._answer(child) for child, *_ in sent]
        if any(said):
            raise RoundFailed("; ".join(filter(None, said)))
        return round_of([(json.loads(file.read_text()), kinds) for _, _, file, kinds in sent])

    def _answer(self, child: Child) -> str:
        """Wait until a client is done; return why it failed, or nothing."""
        try:
            event = child.next_event()
        except ChildFailed as failure:
            return str(failure)
        return "" if event["kind"] == "done" else f"vllm bench serve failed: {event['error']}"


def round_of(results: Sequence[tuple[Mapping[str, Any], Sequence[str]]]) -> dict[str, Any]:
    """Return the requests in detailed results of `vllm bench serve`, each with the kinds of its requests.

    Times are in seconds of the machine's clock. ``number``: the place of a request among all that were sent. Failed
    requests are kept apart, with their errors.

    Raises:
        RoundFailed: no request was answered.
    """
    names = ("start_times", "ttfts", "itls", "output_lens", "generated_texts", "errors")
    columns = [row for result, kinds in results for row in zip(kinds, *(result[name] for name in names), strict=True)]
    found, failed = [], []
    for number, (kind, at, ttft, gaps, tokens, text, error) in enumerate(columns):
        if error:
            failed.append({"kind": kind, "number": number, "error": error.strip()})
        else:
            found.append(answer_of(kind, number, at, ttft, gaps, tokens, text))
    return round_from(found, failed)


def answer_of(
    kind: str, number: int, at: float, ttft: float, gaps: Sequence[float], tokens: int, text: str
) -> dict[str, Any]:
    """Return an answered request as a round has it; ``number``: its place among all that were sent."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"kind": kind, "number": number, "at": at, "ttft": ttft, "gaps": gaps, "tokens": tokens, "digest": digest}


def round_from(found: Sequence[dict[str, Any]], failed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a round of answered and of failed requests.

    Raises:
        RoundFailed: no request was answered.
    """
    if not found:
        raise RoundFailed(f"all {len(failed)} requests failed: {failed[0]['error'] if failed else 'none was sent'}")
    began = min(request["at"] for request in found)
    end = max(request["at"] + request["ttft"] + sum(request["gaps"]) for request in found)
    return {"requests": list(found), "failed": list(failed), "seconds": end - began}

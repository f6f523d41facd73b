"""A `vllm serve` of a benchmark, on a free port of this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.provenance import ROOT
from benchmarks.harness.stats import Summary, quantile
from dev.child_process import ChildProcess

START_SECONDS = 900  # a machine that is busy starts several servers slowly
MODEL_NAME = "tiny"


class Server:
    """Runs `vllm serve` until the stack is left; the plugin is not even loaded if ``stock`` is set.

    Args:
        python: interpreter of the environment whose vLLM serves.
        words: further arguments of `vllm serve`.
        log: name of its log in `.logs`.
        polling: whether vLLM's worker polls between messages, as it does by default; it takes the time of others then.
    """

    def __init__(
        self,
        stack: ExitStack,
        python: str,
        model: Path,
        words: Sequence[str],
        *,
        log: str,
        stock: bool,
        polling: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [str(Path(python).with_name("vllm")), "serve", str(model), "--served-model-name", MODEL_NAME]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager", "--dtype", "float32"]
        if not polling:
            command += ["--worker-extension-cls", "benchmarks.harness.quiet.QuietWorker"]
        variables = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(ROOT)}
        if stock:
            variables["VLLM_PLUGINS"] = ""
        self.process = stack.enter_context(
            ChildProcess(
                [*command, *words], log=ROOT / ".logs" / f"{log}.log", env={**variables, **(environment or {})}
            )
        )

    def wait(self) -> None:
        """Return when it answers.

        Raises:
            SystemExit: it has ended, or does not answer in time.
        """
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            if self.process.exit_code is not None:
                raise SystemExit("the server ended by itself:\n" + "\n".join(self.process.last_lines(25)))
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise SystemExit(f"the server is not healthy after {START_SECONDS} s")

    def version(self) -> str:
        """Return the version of its vLLM, without the part that names the build."""
        return str(httpx.get(f"{self.url}/version", timeout=5).json()["version"]).split("+")[0]

    def pause(self) -> None:
        """Stop all processes of the server: they poll no more, and take no processor time, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the processes of the server go on; do nothing when they do, or have ended."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def ask(self, client: httpx.AsyncClient, content: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
        """Send a chat message and return the seconds to its first token, and its text of four tokens.

        Raises:
            SystemExit: the server refuses it, or answers without a token.
        """
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}]}
        body |= {"temperature": 0, "max_tokens": 4, "stream": True, "ignore_eos": True}
        data = json.dumps(body).encode()
        began, first, text = time.perf_counter(), None, ""
        headers = {"Content-Type": "application/json"}
        async with client.stream("POST", f"{self.url}/v1/chat/completions", content=data, headers=headers) as answer:
            if answer.status_code != 200:
                raise SystemExit((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    if said := choice["delta"].get("content"):
                        first = first or time.perf_counter() - began
                        text += said
        if first is None:
            raise SystemExit("an answer without a token")
        return first, text


def record(rounds: Mapping[str, Sequence[Mapping[str, Any]]], measures: Sequence[str]) -> list[dict[str, Any]]:
    """Return a summary of the rounds by variant and measure, and the median ratio to ``stock`` in a round.

    The ratio is None where it is never defined, because stock's value is always 0.
    """
    stock = rounds["stock"]
    found = []
    for variant, own in rounds.items():
        same = all(one["answers"] == stock[0]["answers"] for one in own)
        for measure in measures:
            values = [one[measure] for one in own]
            ratios = [value / one[measure] for value, one in zip(values, stock, strict=True) if one[measure]]
            entry = {"variant": variant, "measure": measure, **Summary.of(values).as_dict(4), "same_answers": same}
            found.append(entry | {"of_stock": round(quantile(ratios, 0.5), 3) if ratios else None})
    return found

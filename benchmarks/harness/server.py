"""A `vllm serve` of a benchmark, on a free port of this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks.harness.provenance import ROOT
from dev.child_process import ChildProcess

START_SECONDS = 300
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

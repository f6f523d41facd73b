"""`python -m tests.engine.harness.calibrate ARGUMENTS`: the command ``calibrate`` with a server that is forked.

It is started with vLLM imported (`tests/support/warm.py`). The ``vllm serve`` that it measures begins with that as
well, in place of ten seconds of imports for the server and as many for its engine.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import IO, Any
from unittest import mock

from vllm_omni_sched.__main__ import main as command
from vllm_omni_sched.engine.calibration import served


class Forked:
    """Implements the part of `subprocess.Popen` that ``calibrate`` needs, for a program in Python."""

    def __init__(self, command: Sequence[str], *, stdout: IO[bytes], **_: Any) -> None:
        output = f"/proc/{os.getpid()}/fd/{stdout.fileno()}"
        self._process = multiprocessing.get_context("spawn").Process(target=_become, args=(list(command), output))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("vllm serve", timeout or 0.0)
        return code

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _become(command: Sequence[str], output: str) -> None:
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    sys.argv = ["vllm-omni-sched", "calibrate", *sys.argv[1:]]
    with mock.patch.object(served, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked})):
        command()


if __name__ == "__main__":
    main()

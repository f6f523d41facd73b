"""Run pipelines in processes of their own."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from dev.child_process import ChildProcess
from dev.omni_cpu.distribution import environment
from tests.omni.harness.spec import SHM, RunSpec
from tests.support.warm import WarmPopen

PATIENCE_SECONDS = 1500  # a hang is a failure; that a busy machine is slow is none
END_SECONDS = 20

PLUGINS = {"omni_test_connectors": "tests.omni.harness.connectors:register"}
MODULES = ("tests.omni.harness.imports",)


@cache
def omni_environment() -> dict[str, str]:
    """Return what all programs of vLLM-Omni have beside `os.environ`; it is the same for all, so one server forks them.

    The distribution with its entry points is written to a folder that this process removes when it ends.
    """
    folder = Path(tempfile.mkdtemp(prefix="omni-on-cpu-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return environment(folder, PLUGINS)


def start_warm(command: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: Any) -> WarmPopen:
    """Start a program that begins with vLLM-Omni imported."""
    return WarmPopen(command, stdout=stdout, env=env, modules=MODULES, plugins=env["VLLM_PLUGINS"])


@dataclass(frozen=True)
class Outcome:
    """Holds what `harness/main.py` wrote, and the log of `LoggingConnector`, if that was the connector."""

    spec: RunSpec
    results: dict[str, Any]
    log: list[dict[str, Any]]


class Driver:
    """Runs pipelines one after the other in a process; a context manager that leaves nothing running.

    A pipeline that takes the process down, or hangs, costs the others nothing: the next one gets a new process.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._process: ChildProcess | None = None
        self._processes = 0
        self._number = 0
        self._prefix = f"omnitest{os.getpid()}"

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            (self._inbox / "end").touch()
            self._wait_for(lambda: False, END_SECONDS)
            self._stop()

    def run(self, spec: RunSpec) -> Outcome:
        process = self._started()
        stem, self._number = self._inbox / str(self._number), self._number + 1
        draft, results = stem.with_suffix(".asked"), stem.with_suffix(".results.json")
        draft.write_text(json.dumps(spec.to_json()))
        draft.rename(stem.with_suffix(".spec.json"))
        self._wait_for(results.exists, PATIENCE_SECONDS)
        if results.exists():
            return Outcome(spec, json.loads(results.read_text()), _read_log(spec))
        how = "still running" if process.exit_code is None else f"exit code {process.exit_code}"
        self._stop()
        return Outcome(spec, {"error": f"{how}\n" + "\n".join(process.last_lines(60))}, _read_log(spec))

    @property
    def _inbox(self) -> Path:
        return self._folder / f"process-{self._processes}"

    def _started(self) -> ChildProcess:
        if self._process is None:
            self._processes, self._number = self._processes + 1, 0
            self._inbox.mkdir(parents=True)
            self._process = ChildProcess(
                [sys.executable, "-m", "tests.omni.harness.main", str(self._inbox), str(self._model), self._prefix],
                log=self._inbox / "log",
                env=omni_environment(),
                start=start_warm,
            )
        return self._process

    def _stop(self) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None
        for file in SHM.iterdir():
            if self._prefix in file.name:
                file.unlink(missing_ok=True)

    def _wait_for(self, condition: Callable[[], bool], patience_seconds: float) -> None:
        """Until it holds, the process ends, or patience does."""
        deadline = time.monotonic() + patience_seconds
        while not condition() and time.monotonic() < deadline:
            if self._process is None or self._process.exit_code is not None:
                return
            time.sleep(0.1)


def _read_log(spec: RunSpec) -> list[dict[str, Any]]:
    file = Path(spec.extra.get("log", ""))
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []

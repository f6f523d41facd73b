"""A child process with its log in a file, which leaves nothing running behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol


class Started(Protocol):
    """What is asked of a process that has been started."""

    pid: int

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...


class ChildProcess:
    """Start `command` in a session of its own: its own children can be ended with it, and Ctrl-C does not reach it.

    with ChildProcess(["vllm", "serve", ...], log=Path(".logs/serve.log"), env={}) as server:
        ...

    Args:
        start: starts the process, with the arguments of `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str],
        start: Callable[..., Started] = subprocess.Popen,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as output:
            self._process = start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Return its exit code once it has ended by itself."""
        return self._process.wait()

    def last_lines(self, count: int) -> list[str]:
        return self.log.read_text(errors="replace").splitlines()[-count:]

    def stop(self, grace_seconds: float = 20.0) -> int:
        """Ask it to end, wait, then end by force what is left of its process group. Returns its exit code."""
        if self.exit_code is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        for last_word, patience_seconds in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
            deadline = time.monotonic() + patience_seconds
            if not self._signal_group(last_word):
                break
            while self._group_runs() and time.monotonic() < deadline:
                time.sleep(0.05)
        return self._process.wait()

    def _signal_group(self, number: int) -> bool:
        """False when none of its processes is left."""
        self._process.poll()  # reaps it, else it would count as one of them
        try:
            os.killpg(self._process.pid, number)  # it leads its session, so its id is the group's
        except ProcessLookupError:
            return False
        return True

    def _group_runs(self) -> bool:
        """Return whether a process of its group runs.

        One that has ended does not count, though its parent, which may be the first process of the machine, has not
        looked yet how it ended.
        """
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self._process.pid and state not in "ZX":
                    return True
        return False

    def __enter__(self) -> ChildProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

"""A benchmark's subprocess: it prints events, one JSON object a line after `MARK`, and may be sent requests on stdin.

Whatever else it prints (vLLM's log) goes to a file, whose end is shown when the child fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.provenance import ROOT

MARK = "@@event "
GRACE_SECONDS = 30.0


class ChildFailed(RuntimeError):
    """The child ended before it was done; the message ends with the last lines of its log."""


def emit(kind: str, **fields: Any) -> None:
    """Report one event from the child to its parent."""
    print(MARK + json.dumps({"kind": kind, **fields}), flush=True)


def interrupt_on_terminate() -> None:
    """Let SIGTERM end a benchmark like Ctrl-C, so that its children end with it and results are kept."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


class Child:
    """`python -m module arguments` in its own process group, with the repository on its path behind `path`."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        python: str = sys.executable,
        path: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
    ):
        self.module = module
        self.log = tempfile.TemporaryFile("w+", prefix="benchmark-", suffix=".log")  # noqa: SIM115 - closed by stop()
        # An earlier directory wins: a tree of another vLLM must come before the installed one.
        search_path = os.pathsep.join(str(folder) for folder in (*path, ROOT))
        self.process = subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": search_path, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,
            # A shell ignores SIGINT for what it starts in the background, and children inherit that: stop() needs it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def events(self) -> Iterator[dict[str, Any]]:
        """Events until the child ends. Raises ChildFailed when it ends with an error."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            # another process of the child's may have begun the line without ending it
            before, mark, event = line.partition(MARK)
            self.log.write(before)
            if mark:
                yield json.loads(event)
        if self.process.wait() != 0:
            raise ChildFailed(f"{self.module} ended with status {self.process.returncode}\n{self.log_tail()}")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send one request and wait for the next event."""
        self.tell(**request)
        return self.next_event()

    def tell(self, **request: Any) -> None:
        """Send one request; `next_event` must follow."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise ChildFailed(f"{self.module} is gone\n{self.log_tail()}") from None

    def next_event(self) -> dict[str, Any]:
        for event in self.events():
            return event
        raise ChildFailed(f"{self.module} ended without an answer\n{self.log_tail()}")

    def log_tail(self, lines: int = 25) -> str:
        self.log.flush()
        self.log.seek(0)
        return "".join(deque(self.log, maxlen=lines))

    def stop(self) -> None:
        """End the child and what it started: ask, then insist. Does nothing when it has ended."""
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # what was never read has nobody to go to
                    stream.close()
        for demand in (signal.SIGINT, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            self._signal(demand)
            try:
                self.process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self._signal(signal.SIGKILL)  # engine processes that outlived it
        self.log.close()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

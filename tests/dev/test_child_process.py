"""Check how child processes end."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev import child_process
from dev.child_process import ChildProcess

PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def adopts() -> Iterator[None]:
    """Let this process get the orphans of its children, as the first process of a container does."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


def test_what_has_ended_is_not_waited_for_though_nobody_looked_how(
    adopts: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    naps: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(child_process.time, "sleep", lambda seconds: (naps.append(seconds), sleep(seconds)))
    log = tmp_path / "log"
    with ChildProcess(["sh", "-c", "sleep 600 & echo $!; wait"], log=log, env={}) as process:
        while not log.read_text().endswith("\n"):
            assert process.exit_code is None
        naps.clear()
    orphan = int(log.read_text())
    assert os.waitpid(orphan, os.WNOHANG)[0] == orphan  # it had ended, and nobody had looked
    assert sum(naps) < 1.0  # of the three seconds that one gets to end that goes on

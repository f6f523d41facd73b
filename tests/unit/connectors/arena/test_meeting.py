"""Who may take an arena away."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from vllm_omni_sched.connectors.arena import meeting


def test_an_arena_that_was_made_again_is_not_removed_by_who_saw_the_old_one_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look and its lock, the last one left, and others came."""
    arena = tmp_path / "a"
    arena.mkdir(mode=0o700)
    flock = fcntl.flock

    def others_come_first(fd: int, operation: int) -> None:
        arena.rmdir()
        arena.mkdir(mode=0o700)
        (arena / "message").touch()
        flock(fd, operation)

    monkeypatch.setattr(meeting.fcntl, "flock", others_come_first)
    assert meeting.sweep(tmp_path) == 0
    assert [path.name for path in arena.iterdir()] == ["message"]

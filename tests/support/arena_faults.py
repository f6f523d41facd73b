"""Provide what the tests of the arena's faults share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.arena import KIB
from tests.support.processes import Process
from vllm_omni_sched.connectors.arena import index, meeting
from vllm_omni_sched.connectors.arena.index import Layout

ARENA = "vllm_omni_sched.connectors.arena"
IN_RING, IN_POOL = 100, 20 * KIB
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user, or a mount of one's own")
Start = Callable[..., Process]


def files(directory: Path) -> list[str]:
    """Return the kinds of files of members in the arena, without the words that all share."""
    return sorted(path.suffix for path in directory.iterdir() if path.suffix != meeting.WAKE)


def write_to_record(directory: Path, state: int, at: int, written: bytes) -> None:
    """Into the only record of the only outbox that is in a state."""
    (outbox,) = directory.glob("*.out")
    _, _, slots, _, ring_bytes, _ = index.HEAD.unpack(outbox.read_bytes()[: index.HEAD.size])
    sizes = Layout.of(slots, ring_bytes)
    with open(outbox, "r+b") as file:
        content = file.read()
        (slot,) = (i for i in range(slots) if index.RECORD.unpack_from(content, sizes.record_at(i))[0] == state)
        file.seek(sizes.record_at(slot) + at)
        file.write(written)

"""Measure how much shared memory an arena with default options occupies."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support.arena import EDGE, KIB, MIB
from tests.support.arena_faults import Start
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.framing import make_message

RING = 10 * MIB  # and the index
KINDS = {"text": np.int64, "image": np.float32, "audio": np.int16}


@pytest.fixture
def options(root: str) -> ArenaOptions:
    return ArenaOptions(directory=root, arena="a", tune_inline=False)


def settled(directory: Path) -> int:
    """Return the bytes of the file system that the arena has, once its pools have stopped growing."""
    for thread in threading.enumerate():
        if thread.name == "arena-pool":
            thread.join()
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir())


def test_small_messages_take_a_few_megabytes(options: ArenaOptions, directory: Path) -> None:
    """Each kind has messages for its pool, a little above `inline_bytes`, and none waits for long."""
    path = ArenaTransport(options)
    for i in range(300):
        for kind, dtype in KINDS.items():
            path.put(make_message(EDGE, f"{kind}{i}", np.zeros((1, 100 * KIB // np.dtype(dtype).itemsize), dtype)))
            assert path.get(EDGE, f"{kind}{i}") is not None
    assert set(path.health().facts["pools"]) == set(KINDS)
    assert settled(directory) <= RING + len(KINDS) * 4 * MIB
    path.close()


@pytest.mark.parametrize("nbytes", [100 * KIB, 5 * MIB])
def test_what_waits_takes_at_most_half_as_much_again(options: ArenaOptions, directory: Path, nbytes: int) -> None:
    path = ArenaTransport(options)
    for count in range(1, 160 * MIB // nbytes):
        path.put(make_message(EDGE, f"{count}", np.zeros((1, nbytes // 4), np.float32)))
        if count % (20 * MIB // nbytes) == 0:
            pool = path.health().facts["pools"]["image"]
            assert settled(directory) <= RING + max(4 * MIB, 1.5 * pool["used_bytes"])
    path.close()


def test_a_receiver_in_another_process_sees_what_its_sender_has_grown_by(start: Start) -> None:
    """The receiver has mapped the pool when it was small; messages from all its later parts are whole."""
    sender, receiver = start(), start()
    sender.put("first", 100 * KIB, 7)
    assert receiver.get("first", hold=True) == (100 * KIB, 7)
    assert sender.health()[2]["pools"]["image"]["capacity_bytes"] == 4 * MIB
    assert sender.put_many(8, 5 * MIB) == 8
    assert sender.health()[2]["pools"]["image"]["capacity_bytes"] > 40 * MIB
    for i in range(8):
        assert receiver.get(f"m{i}") == (5 * MIB, i)

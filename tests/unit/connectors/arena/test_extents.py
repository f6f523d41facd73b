"""Extents and the ring, by examples; `tests/properties/test_arena_extents.py` has the rules."""

import pytest

from vllm_omni_sched.connectors.arena.extents import Extents


def test_extents_are_the_lowest_that_fit() -> None:
    extents = Extents(64, 640)
    assert [extents.allocate(n) for n in (1, 64, 65, 0)] == [0, 64, 128, 256]
    assert extents.free(64) == 64
    assert extents.allocate(65) == 320
    assert extents.allocate(64) == 64
    assert (extents.used_bytes, extents.largest_free_bytes) == (448, 192)
    assert extents.allocate(193) is None


def test_extents_join_their_neighbours() -> None:
    extents = Extents(64, 256)
    for _ in range(4):
        extents.allocate(64)
    for start in (0, 128):
        extents.free(start)
    assert (extents.largest_free_bytes, extents.fragmentation) == (64, 0.5)
    extents.free(64)
    assert (extents.largest_free_bytes, extents.fragmentation) == (192, 0.0)
    extents.extend(512)
    extents.free(192)
    assert extents.allocate(512) == 0
    assert (extents.fragmentation, extents.largest_free_bytes) == (0.0, 0)


def test_one_that_stays_holds_nobody_up() -> None:
    room = Extents(64, 256)
    assert room.allocate(64) == 0  # stays
    for _ in range(100):
        assert [room.allocate(65), room.allocate(64)] == [64, 192]
        room.free(192)
        room.free(64)


def test_what_was_not_given_out_cannot_be_given_back() -> None:
    room = Extents(64, 640)
    start = room.allocate(64)
    assert start == 0
    room.free(0)
    for free in (0, 64, -1):
        with pytest.raises(KeyError):
            room.free(free)

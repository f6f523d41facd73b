"""Extents and the ring, by examples; `tests/properties/test_arena_room.py` has the rules."""

import pytest

from vllm_omni_sched.connectors.arena.room import Extents, Ring


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


def test_a_ring_goes_round_and_waits_for_the_oldest() -> None:
    ring = Ring(256)
    assert [ring.allocate(64) for _ in range(4)] == [0, 64, 128, 192]
    assert ring.allocate(1) is None
    ring.free(64)
    assert ring.allocate(1) is None  # behind one that is there
    ring.free(0)
    assert [ring.allocate(n) for n in (65, 1)] == [0, None]
    for start in (128, 192, 0):
        ring.free(start)
    assert ring.used_bytes == 0
    assert ring.allocate(256) == 0
    assert ring.allocate(257) is None


def test_a_ring_leaves_its_end_empty_for_what_does_not_fit() -> None:
    ring = Ring(256)
    assert [ring.allocate(128), ring.allocate(64)] == [0, 128]
    ring.free(0)
    assert ring.allocate(128) == 0
    assert ring.allocate(64) is None
    ring.free(128)
    assert ring.allocate(64) == 128


@pytest.mark.parametrize("room", [Extents(64, 640), Ring(640)])
def test_what_was_not_given_out_cannot_be_given_back(room: Extents | Ring) -> None:
    start = room.allocate(64)
    assert start == 0
    room.free(0)
    for free in (0, 64, -1):
        with pytest.raises(KeyError):
            room.free(free)

"""Extents against what they promise: no overlap, no byte lost, all of it back in the end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.connectors.arena.extents import Extents

BLOCK = 64
steps = st.lists(st.tuples(st.booleans(), st.integers(0, 700)), max_size=80)


def check_apart(given_out: dict[int, int], capacity: int) -> None:
    end = 0
    for start, nbytes in sorted(given_out.items()):
        assert start >= end
        assert start % BLOCK == 0
        end = start + nbytes
    assert end <= capacity


@settings(deadline=None)
@given(steps, st.integers(0, 20), st.integers(0, 20))
def test_extents(steps: list[tuple[bool, int]], blocks: int, more: int) -> None:
    extents, free, given_out = Extents(BLOCK, blocks * BLOCK), [True] * blocks, dict[int, int]()
    for i, (allocate, number) in enumerate(steps):
        if i == 20:
            extents.extend((blocks + more) * BLOCK)
            free += [True] * more
        if allocate:
            needed = max(1, -(-number // BLOCK))
            fits = [b for b in range(len(free) - needed + 1) if all(free[b : b + needed])]
            start = extents.allocate(number)
            assert start == (fits[0] * BLOCK if fits else None)
            if start is not None:
                given_out[start] = extents.rounded(number)
                free[fits[0] : fits[0] + needed] = [False] * needed
        elif given_out:
            start = sorted(given_out)[number % len(given_out)]
            nbytes = given_out.pop(start)
            assert extents.free(start) == nbytes
            free[start // BLOCK : (start + nbytes) // BLOCK] = [True] * (nbytes // BLOCK)
        check_apart(given_out, extents.capacity)
        assert extents.used_bytes == sum(given_out.values()) == free.count(False) * BLOCK
        runs = "".join("f" if is_free else " " for is_free in free).split()
        assert extents.largest_free_bytes == BLOCK * max(map(len, runs), default=0)
        assert extents._starts == sorted(extents._free)
        assert len(extents._free) == len(runs)  # neighbours are joined
    for start in list(given_out):
        extents.free(start)
    assert (extents.used_bytes, extents.largest_free_bytes) == (0, extents.capacity)

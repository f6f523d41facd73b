"""Rules of `Preload`: which checkpoint files are read ahead, and in which pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.resource.pipeline.preload import PIECE_BYTES, CheckpointFile, Preload, PreloadReason

READ, SAME, FULL = PreloadReason.READ, PreloadReason.SAME_FILE, PreloadReason.NO_MEMORY


def files(*sizes: int, identities: str = "") -> list[CheckpointFile]:
    return [
        CheckpointFile(f"/{number}", size, (1, ord(identities[number]) if identities else number))
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "identities", "available", "reasons"),
    [
        ((4, 4), "", 100, [READ, READ]),
        ((4, 4, 4), "aba", 100, [READ, READ, SAME]),
        ((4, 4, 2), "", 12, [READ, FULL, FULL]),  # of which the half may be used; what comes later stays out
        ((4, 4, 4), "aab", 8, [READ, SAME, FULL]),  # what is read already needs no room
        ((7,), "", 12, [FULL]),
        ((0, 6), "", 12, [READ, READ]),
        ((), "", 12, []),
    ],
)
def test_reasons(sizes: tuple[int, ...], identities: str, available: int, reasons: list[PreloadReason]):
    plan = Preload(0.5).plan(files(*sizes, identities=identities), available)
    assert [reason for _, reason in plan.reasons] == reasons


@given(
    st.lists(st.tuples(st.integers(0, 5 * PIECE_BYTES), st.integers(0, 5)), max_size=8),
    st.integers(0, 20 * PIECE_BYTES),
    st.floats(0.01, 1.0),
)
def test_pieces_cover_each_file_once_and_never_more_than_the_memory(
    found: list[tuple[int, int]], available: int, fraction: float
):
    given_files = [CheckpointFile(f"/{number}", size, (0, inode)) for number, (size, inode) in enumerate(found)]
    plan = Preload(fraction).plan(given_files, available)
    assert plan.nbytes <= available * fraction
    for file, reason in plan.reasons:
        of_file = [piece for piece in plan.pieces if piece.path == file.path]
        assert sum(piece.nbytes for piece in of_file) == (file.nbytes if reason is READ else 0)
        assert [piece.offset for piece in of_file] == [PIECE_BYTES * number for number in range(len(of_file))]
        assert all(0 < piece.nbytes <= PIECE_BYTES for piece in of_file)
    assert [file for file, _ in plan.reasons] == given_files
    order = [piece.path for piece in plan.pieces]
    assert order == sorted(order)


@pytest.mark.parametrize("fraction", [0.0, 1.01, -1.0])
def test_a_fraction_out_of_range_is_refused(fraction: float):
    with pytest.raises(ConfigError, match="memory_fraction must be"):
        Preload(fraction)

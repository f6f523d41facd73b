"""Operations on large arrays, in pieces that stay in the processor's cache."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

PIECE = 1 << 15
"""Elements of a piece: with float32 temporaries, 128 KiB each."""


def pieces(total: int, step: int = PIECE) -> Iterator[slice]:
    """Yield slices that cover ``range(total)``."""
    for start in range(0, total, max(1, step)):
        yield slice(start, min(total, start + step))


def lookup(
    table: npt.NDArray[np.generic], indices: npt.NDArray[np.unsignedinteger], out: npt.NDArray[np.generic]
) -> None:
    """Set ``out[i] = table[indices[i]]`` for flat arrays; every index must be in the table.

    `numpy.take` copies indices of a small type to a large one: piecewise, that copy stays in the cache.
    """
    wide = np.empty(min(PIECE, indices.size), np.intp)
    for piece in pieces(indices.size):
        part = wide[: piece.stop - piece.start]
        part[:] = indices[piece]
        np.take(table, part, out=out[piece], mode="clip")

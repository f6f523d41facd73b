"""Positions of a prompt that grows, continued where they ended instead of computed from the start.

Multi-dimensional positions (M-RoPE) are a function of the whole prompt, but for the
models this is used with each stretch of text and each item starts at the highest
position before it, plus one. So a tail, computed as if it were a prompt of its own and
moved up by that number, has exactly the positions it has in the whole prompt.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.integer[Any]]
"""Positions, one row for each dimension."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What follows the known tokens, as a prompt of its own: its items are counted from its first token."""

    tokens: Sequence[int]
    items: list[Any]


class KnownPositions:
    """How far the positions of one session's prompt are known, and what they go on with.

    A prompt is recognised by the identity of its token array, which a worker only
    extends; another array under the same request is another prompt (it was sent anew).

    Args:
        items: all items of the prompt.
        next_position: the highest position, plus one.
        num_positions: how many positions were computed; more or fewer than there are
            tokens is possible where an item reaches beyond the prompt, and cannot be continued.
    """

    __slots__ = ("_closed", "_tokens", "next_position", "num_items", "num_tokens")

    def __init__(self, tokens: array[int], items: Sequence[Any], next_position: int, num_positions: int) -> None:
        self._tokens = weakref.ref(tokens)  # the prompt is its owner's to drop
        self.num_items = len(items)
        self._reach(len(tokens), items, 0, next_position, num_positions)

    def _reach(
        self, num_tokens: int, items: Sequence[Any], origin: int, next_position: int, num_positions: int
    ) -> None:
        ends = (origin + item.mm_position.offset + item.mm_position.length for item in items)
        self._closed = num_positions == num_tokens and max(ends, default=0) <= num_tokens
        self.num_tokens = num_tokens
        self.next_position = next_position

    def tail(self, tokens: array[int], items: Sequence[Any]) -> Tail | None:
        """What is to be computed, or None when only the whole prompt would give the right positions.

        An empty tail is one where nothing is.
        """
        if not self._closed or self._tokens() is not tokens:
            return None
        origin = self.num_tokens
        new = items[self.num_items :]
        if len(tokens) < origin or len(items) < self.num_items or (new and len(tokens) == origin):
            return None
        if any(item.mm_position.offset < origin for item in new):
            return None  # it would lie, or begin, in what is known
        moved = [
            replace(item, mm_position=replace(item.mm_position, offset=item.mm_position.offset - origin))
            for item in new
        ]
        return Tail(tokens[origin:], moved)

    def extend(self, tail: Tail, next_position: int, num_positions: int) -> None:
        """The tail is known too: ``next_position`` and ``num_positions`` as it has them on its own."""
        origin = self.num_tokens
        self.num_items += len(tail.items)
        self._reach(
            origin + len(tail.tokens), tail.items, origin, self.next_position + next_position, origin + num_positions
        )


class GrowingRows:
    """Rows that grow at their end; room is doubled, so that a column is copied a bounded number of times.

    ``columns_copied`` counts those copies, for tests.
    """

    __slots__ = ("_buffer", "columns_copied", "num_columns")

    def __init__(self, rows: Rows) -> None:
        self._buffer = rows  # without room: the first append replaces it, so it is never written to
        self.num_columns = rows.shape[1]
        self.columns_copied = 0

    def append(self, rows: Rows, plus: int) -> Rows:
        """Add ``rows + plus``; a view of all columns."""
        start, end = self.num_columns, self.num_columns + rows.shape[1]
        if end > self._buffer.shape[1]:
            grown = np.empty((self._buffer.shape[0], max(end, 2 * start)), dtype=self._buffer.dtype)
            grown[:, :start] = self._buffer[:, :start]
            self._buffer = grown
            self.columns_copied += start
        np.add(rows, plus, out=self._buffer[:, start:end])
        self.num_columns = end
        return self._buffer[:, :end]

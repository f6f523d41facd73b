"""Positions of a growing prompt, continued where they ended instead of computed from the start.

Multi-dimensional positions (M-RoPE) are a function of the whole prompt. For the models for which this is used, however,
each stretch of text and each item starts at the highest position before it, plus one. So a tail that is computed as a
prompt of its own, and then shifted by that number, has exactly the positions that it has in the whole prompt.
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
    """Holds the part of a prompt behind the known tokens; items are counted from its first token."""

    tokens: Sequence[int]
    items: list[Any]


class KnownPositions:
    """Keeps the known positions of one session's prompt, and the state from which they continue.

    A prompt is recognised by the identity of its token array, which a worker only extends; another array under the
    same request is another prompt (the request was sent again).

    Args:
        items: all items of the prompt.
        next_position: the highest position, plus one.
        num_positions: number of computed positions; it differs from the number of tokens if an item reaches beyond
            the prompt, and such positions cannot be continued.
    """

    __slots__ = ("_closed", "_tokens", "next_position", "num_items", "num_tokens")

    def __init__(self, tokens: array[int], items: Sequence[Any], next_position: int, num_positions: int) -> None:
        self._tokens = weakref.ref(tokens)  # weak, so that its owner can drop the prompt
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
        """Return the part to compute; None if only the whole prompt would give the right positions.

        An empty tail means that there is nothing to compute.
        """
        if not self._closed or self._tokens() is not tokens:
            return None
        origin = self.num_tokens
        new = items[self.num_items :]
        if len(tokens) < origin or len(items) < self.num_items or (new and len(tokens) == origin):
            return None
        if any(item.mm_position.offset < origin for item in new):
            return None  # the item begins inside the known part
        moved = [
            replace(item, mm_position=replace(item.mm_position, offset=item.mm_position.offset - origin))
            for item in new
        ]
        return Tail(tokens[origin:], moved)

    def extend(self, tail: Tail, next_position: int, num_positions: int) -> None:
        """Add the tail to the known part; ``next_position`` and ``num_positions`` are those of the tail as a prompt of
        its own.
        """
        origin = self.num_tokens
        self.num_items += len(tail.items)
        self._reach(
            origin + len(tail.tokens), tail.items, origin, self.next_position + next_position, origin + num_positions
        )


class GrowingRows:
    """Rows that grow at their end; capacity is doubled, so that the copies of columns are amortised.

    ``columns_copied`` counts those copies, for tests.
    """

    __slots__ = ("_buffer", "columns_copied", "num_columns")

    def __init__(self, rows: Rows) -> None:
        self._buffer = rows  # without room: the first append replaces it, so it is never written to
        self.num_columns = rows.shape[1]
        self.columns_copied = 0

    def append(self, rows: Rows, plus: int) -> Rows:
        """Append ``rows + plus`` and return a view of all columns."""
        start, end = self.num_columns, self.num_columns + rows.shape[1]
        if end > self._buffer.shape[1]:
            grown = np.empty((self._buffer.shape[0], max(end, 2 * start)), dtype=self._buffer.dtype)
            grown[:, :start] = self._buffer[:, :start]
            self._buffer = grown
            self.columns_copied += start
        np.add(rows, plus, out=self._buffer[:, start:end])
        self.num_columns = end
        return self._buffer[:, :end]

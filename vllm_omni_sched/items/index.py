"""An index of the items that overlap a window of token positions; queries take O(log n + answer).

vLLM bisects its feature list on offsets and on ends (vllm#44212), and so relies on both being sorted. That holds for
most prompts, but not for nested spans. This index bisects a running *maximum* of ends instead: it is sorted by
construction, so the search is correct for any list.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from typing import Any


class ItemIndex:
    """Spans ``[start, end)`` of items, in list order, growing at the tail.

    1. ``sequential`` is true while starts and ends never decrease; then a plain bisect over either is correct, and
       no search needs this index.
    2. Each span is visited once, when it is appended.
    3. Spans that start before an earlier one are sorted in separate arrays; only such a span costs O(n).

    ``spans_visited`` counts the spans that queries visited one by one, so that tests can check the cost by counting.
    """

    __slots__ = (
        "_order",
        "_sorted_max_ends",
        "_sorted_starts",
        "ends",
        "max_ends",
        "sequential",
        "spans_visited",
        "starts",
    )

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self.starts = array("q")
        self.ends = array("q")
        self.max_ends = array("q")
        self.sequential = True
        self.spans_visited = 0
        # Item ids by start, with their starts and running maximum of ends; None while list order is start order.
        self._order: list[int] | None = None
        self._sorted_starts = self._sorted_max_ends = self.starts  # until `_order` exists
        if spans:
            self.extend(spans)

    def __len__(self) -> int:
        return len(self.starts)

    def extend(self, spans: Iterable[tuple[int, int]]) -> None:
        """Add the spans of the next items: token positions, end exclusive."""
        new = list(spans)
        self.extend_columns([start for start, _ in new], [end for _, end in new])

    def extend_columns(self, starts: list[int], ends: list[int]) -> None:
        """Add spans given as a list of starts and a list of ends; see `extend`."""
        if not starts:
            return
        first = len(self.starts)
        ascending = (first == 0 or starts[0] >= self.starts[-1]) and starts == sorted(starts)
        if (first == 0 or ends[0] >= self.max_ends[-1]) and ends == sorted(ends):
            max_ends = ends
        else:
            max_ends = _running_max(ends, self.max_ends[-1] if first else ends[0])
        # Making an array from a list of numbers takes a third of the time of extending one.
        self.starts += array("q", starts)
        more_ends = array("q", ends)
        self.ends += more_ends
        self.max_ends += more_ends if max_ends is ends else array("q", max_ends)
        if not ascending or max_ends is not ends:
            self.sequential = False
        if not ascending:
            self._sort()
        elif self._order is not None:
            if starts[0] < self._sorted_starts[-1]:
                self._sort()
                return
            self._order.extend(range(first, first + len(starts)))
            self._sorted_starts.extend(starts)
            self._sorted_max_ends.extend(_running_max(ends, self._sorted_max_ends[-1]))

    @property
    def ascending(self) -> bool:
        """Return whether no span starts before an earlier one."""
        return self._order is None

    def append(self, start: int, end: int) -> None:
        """Add the span of the next item."""
        starts = self.starts
        if self._order is None and (not starts or (start >= starts[-1] and end >= self.max_ends[-1])):
            starts.append(start)
            self.ends.append(end)
            self.max_ends.append(end)
        else:
            self.extend_columns([start], [end])

    def _sort(self) -> None:
        self._order = sorted(range(len(self.starts)), key=self.starts.__getitem__)
        self._sorted_starts = array("q", (self.starts[i] for i in self._order))
        ends = [self.ends[i] for i in self._order]
        self._sorted_max_ends = array("q", _running_max(ends, ends[0]))

    def overlapping(self, start: int, end: int) -> Sequence[int]:
        """Return the ids of the items with a token in ``[start, end)``, ordered by their start.

        The result is a ``range`` while the list is sequential, else a list. An item of length 0 counts as
        overlapping if it lies inside the window, as in vLLM.
        """
        if self.sequential:
            return range(*self.bounds(start, end))
        starts, max_ends = self.starts, self.max_ends
        if self._order is not None:
            starts, max_ends = self._sorted_starts, self._sorted_max_ends
        low, high = bisect_right(max_ends, start), bisect_left(starts, end)
        self.spans_visited += max(0, high - low)
        candidates = range(low, high) if self._order is None else self._order[low:high]
        return [i for i in candidates if self.ends[i] > start]

    def bounds(self, start: int, end: int) -> tuple[int, int]:
        """Return the first and last (exclusive) item with a token in ``[start, end)``, of a sequential list."""
        return bisect_right(self.ends, start), bisect_left(self.starts, end)

    def num_covered(self, position: int) -> int:
        """Return how many leading items end at or before ``position``, together with all items before them."""
        return bisect_right(self.max_ends, position)


def _running_max(values: list[int], before: int) -> list[int]:
    return list(islice(accumulate(values, max, initial=before), 1, None))


class FeatureWindows:
    """Keeps an `ItemIndex` for each request's feature list, built once and extended as the list grows.

    A list is recognised by identity: another list under the same request id (the request was sent again) gets a new
    index.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[Sequence[Any], ItemIndex]] = {}

    def index_of(self, request_id: str, features: Sequence[Any]) -> ItemIndex:
        """Return the index of ``features``, updated in O(new items)."""
        known = self._known.get(request_id)
        if known is not None and known[0] is features and len(known[1]) <= len(features):
            index = known[1]
        else:
            index = ItemIndex()
            self._known[request_id] = (features, index)
        if len(index) < len(features):
            positions = [f.mm_position for f in features[len(index) :]]
            index.extend_columns([p.offset for p in positions], [p.offset + p.length for p in positions])
        return index

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._known.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._known)

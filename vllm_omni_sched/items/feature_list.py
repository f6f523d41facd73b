"""The multimodal features of one request, with the state that the scheduler keeps about them.

A `FeatureList` is a ``list`` subclass, so that vLLM's own code can read and extend it. The bookkeeping costs O(1) per
item over the life of the request. An index costs a pass over all items, and a list subclass doubles the cost of each
``features[i]`` in vLLM's loops: CPython's fast path for subscripts is for exact lists. The scheduler keeps a request's
exact list if `is_in_line` and the searches after it do for it, and makes a `FeatureList` of any other.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

from vllm_omni_sched.items.index import ItemIndex
from vllm_omni_sched.items.spill import SpillFile

Strip = Callable[[Any], Any]
"""Feature -> the same feature without the data a worker no longer needs (or itself)."""


class FeatureList(list[Any]):
    """Features in prompt order, indexed by token position, with a frontier of committed items.

    1. ``spans`` indexes the span of every feature; it grows with the list.
    2. ``advance(n)`` moves the frontier behind the items that end at or before ``n``, whose data a worker with
       ``n`` computed tokens no longer needs. O(log n).
    3. A smaller ``n`` (preemption, rewind) moves the frontier back and restores the data.
    4. ``as_sent(n)`` returns the list for such a worker: items before the frontier are stripped of their data. Only
       items between the former and the new frontier are touched (vLLM walks all: ``strip_covered_mm_data``,
       vllm#52041, vllm#58324).
    5. ``release_committed()`` moves the data of items before the frontier to a spill file; rule 3 reads it back.

    A nested item behind a longer one keeps its data until the longer one is covered, too: more data is sent than by
    vLLM, never less.

    Reordering is not supported: only growth at the tail and replacement in place are tracked.
    """

    __slots__ = (
        "_num_stripped",
        "_sent",
        "defer",
        "frontier",
        "grows",
        "items_touched",
        "num_released",
        "spans",
        "spill",
    )

    def __init__(self, features: Iterable[Any] = ()) -> None:
        super().__init__()
        self.spans = ItemIndex()
        self.frontier = 0  # leading items whose data no worker needs
        self.grows = False  # set for a session: a worker in this process must not see items before it is sent them
        self.defer = False  # a full message may turn out unnecessary: do not prepare one before it is asked for
        self.items_touched = 0  # for tests: items looked at one by one, all calls together
        self.num_released = 0  # leading items whose data is in `spill`
        self.spill: SpillFile | None = None
        self._sent: list[Any] = []
        self._num_stripped = 0  # leading items that are stripped in `_sent`
        self.extend(features)

    def append(self, feature: Any) -> None:
        position = feature.mm_position
        self.spans.append(position.offset, position.offset + position.length)
        super().append(feature)

    def extend(self, features: Iterable[Any]) -> None:
        new = features if type(features) is list else list(features)
        if len(new) == 1:
            self.append(new[0])
            return
        positions = [feature.mm_position for feature in new]
        self.spans.extend_columns([p.offset for p in positions], [p.offset + p.length for p in positions])
        super().extend(new)

    def __iadd__(self, features: Iterable[Any]) -> "FeatureList":  # type: ignore[misc]
        self.extend(features)
        return self

    def insert(self, index: SupportsIndex, feature: Any) -> None:
        raise TypeError("a FeatureList grows at its tail only: use append or extend")

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets a plain list.
        return list, (list(self),)

    def ends_after(self, position: int) -> bool:
        """Return whether any item has a token at or after ``position``."""
        ends = self.spans.max_ends
        return len(ends) > 0 and ends[-1] > position

    def advance(self, num_computed_tokens: int) -> int:
        """Move the frontier to ``num_computed_tokens``, forward or back, and return it."""
        target = self.spans.num_covered(num_computed_tokens) if num_computed_tokens > 0 else 0
        if target < self.frontier:
            self._restore(target)
        self.frontier = target
        return target

    def as_sent(self, num_computed_tokens: int, strip: Strip) -> list[Any]:
        """Return the features as sent to a worker that has computed ``num_computed_tokens``.

        The next call changes the returned list: copy it to keep it. For a list that does not grow, it is this list
        itself until an item is covered, as in vLLM.
        """
        target = self.advance(num_computed_tokens)
        sent = self._sent
        if not (target or sent or self.grows):
            return self
        if len(sent) < len(self):
            sent.extend(self[len(sent) :])
        for i in range(target, self._num_stripped):
            sent[i] = self[i]
        for i in range(self._num_stripped, target):
            sent[i] = strip(self[i])
        self.items_touched += abs(target - self._num_stripped)
        self._num_stripped = target
        return sent

    def is_behind(self, num_computed_tokens: int) -> bool:
        """Return whether this position lies before the frontier."""
        return self.frontier > 0 and self.spans.max_ends[self.frontier - 1] > num_computed_tokens

    def rewind(self, num_computed_tokens: int) -> dict[int, Any]:
        """Move the frontier back; return the features, by id, that a worker must be sent again."""
        if not self.is_behind(num_computed_tokens):
            return {}
        former = self.frontier
        target = self.advance(num_computed_tokens)
        for i in range(target, self._num_stripped):
            self._sent[i] = self[i]
        self._num_stripped = min(self._num_stripped, target)
        self.items_touched += former - target
        return {i: self[i] for i in range(target, former)}

    def _restore(self, target: int) -> None:
        if target >= self.num_released or self.spill is None:
            return
        for i, data in self.spill.read(target, self.num_released).items():
            # The same feature except for its data: block hashes may depend on the identity of its strings.
            self[i] = replace(self[i], data=data)
        self.num_released = target

    def with_data(self, item: int) -> Any:
        """Return feature ``item`` with its data, from the spill file if necessary; the frontier stays."""
        feature = self[item]
        if self.spill is not None and item < self.num_released and item in self.spill:
            return replace(feature, data=self.spill.read(item, item + 1)[item])
        return feature

    def release_committed(self, batch: int, spill: SpillFile, strip: Strip) -> int:
        """Release the data of committed items, ``batch`` or more at a time.

        Returns:
            The number of items released; 0 if fewer than ``batch`` are due, or the spill file is full (the data
            then stays in memory).

        Raises:
            OSError: the spill file cannot be written; nothing was released.
        """
        first, last = self.num_released, self.frontier
        if last - first < batch:
            return 0
        stripped = [strip(self[i]) for i in range(first, last)]
        due = {i: self[i].data for i, bare in enumerate(stripped, first) if bare is not self[i] and i not in spill}
        if due and not spill.write(due):
            return 0
        self.spill = spill
        self[first:last] = stripped
        in_sent = min(last, len(self._sent))
        if first < in_sent:
            self._sent[first:in_sent] = stripped[: in_sent - first]
            self._num_stripped = max(self._num_stripped, in_sent)
        self.items_touched += last - first
        self.num_released = last
        return last - first

    def close(self) -> None:
        """Free the spill file's space, because the request has ended."""
        if self.spill is not None:
            self.spill.close()
            self.spill = None


def is_in_line(features: Iterable[Any]) -> bool:
    """Return whether each item begins at or after the end of the one before it. Visits each item once."""
    end = 0
    for feature in features:
        position = feature.mm_position
        start = position.offset
        if start < end:
            return False
        end = start + position.length
    return True


def in_order(features: Sequence[Any]) -> bool:
    """Return whether starts and ends never decrease, for a request that the scheduler has admitted. O(1)."""
    return type(features) is list or (isinstance(features, FeatureList) and features.spans.sequential)


def ends_after(features: Sequence[Any], position: int) -> bool:
    """Return whether any item of a request that the scheduler has admitted has a token at or after
    ``position``. O(1).
    """
    if type(features) is list:
        last = features[-1].mm_position
        return bool(last.offset + last.length > position)
    return isinstance(features, FeatureList) and features.ends_after(position)


def num_covered(features: Sequence[Any], position: int) -> int:
    """Return how many leading items end at or before ``position``, for items that are `in_order`. O(log n)."""
    if isinstance(features, FeatureList):
        return features.spans.num_covered(position)
    return bisect_right(features, position, key=_end)


def _end(feature: Any) -> int:
    end: int = feature.mm_position.offset + feature.mm_position.length
    return end

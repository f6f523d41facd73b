"""The multimodal features of one request, with what the scheduler needs to know of them.

A ``list`` subclass, so that vLLM's own code reads and extends it as ever; the
bookkeeping rides along and costs O(1) per item over the life of the request.
"""

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

from vllm_omni_sched.items.index import ItemIndex
from vllm_omni_sched.items.spill import SpillFile

Strip = Callable[[Any], Any]
"""Feature -> the same feature without the data a worker no longer needs (or itself)."""


class FeatureList(list[Any]):
    """Features in prompt order, indexed by token position, with a frontier of committed items.

    1. ``spans`` knows every feature's span; it is extended as the list is.
    2. ``as_sent(n)`` is the list as a worker with ``n`` computed tokens gets it: items
       that end at or before ``n`` are stripped of their data. Only items between
       the former frontier and the new one are touched (vLLM walks all of them:
       ``strip_covered_mm_data``, vllm#52041, vllm#58324).
    3. A smaller ``n`` (preemption, rewind) moves the frontier back and gives the data back.
    4. ``release_committed()`` moves the data of committed items to a spill file;
       rule 3 reads it back.

    A nested item behind a longer, still open one keeps its data until that one is
    covered too: more than vLLM sends, never less.

    Not for reordering: only growth at the tail and replacement in place are tracked.
    """

    __slots__ = ("_sent", "frontier", "items_touched", "num_released", "spans", "spill")

    def __init__(self, features: Iterable[Any] = ()) -> None:
        super().__init__()
        self.spans = ItemIndex()
        self.frontier = 0  # leading items that are stripped in what was last sent
        self.items_touched = 0  # for tests: items looked at one by one, all calls together
        self.num_released = 0  # leading items whose data is in `spill`
        self.spill: SpillFile | None = None
        self._sent: list[Any] = []
        self.extend(features)

    def append(self, feature: Any) -> None:
        self.extend((feature,))

    def extend(self, features: Iterable[Any]) -> None:
        new = list(features)
        positions = [feature.mm_position for feature in new]
        self.spans.extend_columns([p.offset for p in positions], [p.offset + p.length for p in positions])
        super().extend(new)

    def __iadd__(self, features: Iterable[Any]) -> "FeatureList":  # type: ignore[misc]
        self.extend(features)
        return self

    def insert(self, index: SupportsIndex, feature: Any) -> None:
        raise TypeError("FeatureList grows at its tail only: append or extend it")

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process gets a plain list.
        return list, (list(self),)

    def as_sent(self, num_computed_tokens: int, strip: Strip) -> list[Any]:
        """The features as sent to a worker that has computed ``num_computed_tokens``.

        The returned list is kept and changed by the next call: copy it to keep it.
        """
        if len(self._sent) < len(self):
            self._sent.extend(self[len(self._sent) :])
        target = self.spans.num_covered(num_computed_tokens) if num_computed_tokens > 0 else 0
        if target < self.frontier:
            self._give_back(target)
        for i in range(self.frontier, target):
            self._sent[i] = strip(self[i])
        self.items_touched += target - self.frontier if target > self.frontier else 0
        self.frontier = target
        return self._sent

    def rewind(self, num_computed_tokens: int) -> dict[int, Any]:
        """Move the frontier back; the features, by id, that a worker must be given again."""
        former, target = self.frontier, self.spans.num_covered(num_computed_tokens)
        if target >= former:
            return {}
        self._give_back(target)
        self.frontier = target
        return {i: self[i] for i in range(target, former)}

    def _give_back(self, target: int) -> None:
        self._restore(target)
        for i in range(target, self.frontier):
            self._sent[i] = self[i]
        self.items_touched += self.frontier - target

    def _restore(self, target: int) -> None:
        if target >= self.num_released or self.spill is None:
            return
        for i, feature in self.spill.read(target, self.num_released).items():
            self[i] = feature
        self.num_released = target

    def with_data(self, item: int) -> Any:
        """Feature ``item`` with its data, from the spill file if need be; the frontier stays."""
        feature = self[item]
        if feature.data is None and self.spill is not None and item < self.num_released:
            return self.spill.read(item, item + 1).get(item, feature)
        return feature

    def release_committed(self, batch: int, spill: SpillFile) -> int:
        """Let go of the data of committed items, ``batch`` or more at a time.

        Returns:
            How many items were released now; 0 when fewer than ``batch`` are due or
            the spill file is full (the data then stays in memory).

        Raises:
            OSError: the spill file cannot be written; nothing was released.
        """
        first, last = self.num_released, self.frontier
        if last - first < batch:
            return 0
        due = {i: self[i] for i in range(first, last) if self[i] is not self._sent[i] and i not in spill}
        if due and not spill.write(due):
            return 0
        self.spill = spill
        for i in range(first, last):
            self[i] = self._sent[i]
        self.num_released = last
        return last - first

    def close(self) -> None:
        """Give the spill file's space back; the request is over."""
        if self.spill is not None:
            self.spill.close()
            self.spill = None

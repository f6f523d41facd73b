"""Queue sequences that wait to run: by arrival, as in vLLM, or by the order of `WaitingQueue`."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.graph.affinity import AFFINITY_ITEMS
from vllm_omni_sched.graph.order import Placed
from vllm_omni_sched.graph.waiting_queue import WaitingQueue
from vllm_omni_sched.sim.engine.sequence import Sequence


class Waiting(Protocol):
    """Queue of waiting sequences."""

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """Return all waiting sequences by name."""

    def push(self, sequence: Sequence, now: float, *, again: bool = False) -> None:
        """Add a sequence; ``again``: it ran before, or was held back."""

    def peek(self, now: float) -> Sequence | None:
        """Return the next sequence, None if the queue is empty."""

    def pop(self, now: float) -> Sequence:
        """Remove and return the sequence that `peek` returns."""

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence, and return whether it waited here."""

    def first(self, count: int, now: float) -> list[Sequence]:
        """Return at most the first ``count`` sequences for a plan."""


class ByArrival:
    """First come, first served; a sequence that comes again goes to the front."""

    def __init__(self) -> None:
        self.sequences: OrderedDict[str, Sequence] = OrderedDict()

    def push(self, sequence: Sequence, now: float, *, again: bool = False) -> None:
        self.sequences[sequence.request_id] = sequence
        if again:
            self.sequences.move_to_end(sequence.request_id, last=False)

    def peek(self, now: float) -> Sequence | None:
        return next(iter(self.sequences.values()), None)

    def pop(self, now: float) -> Sequence:
        return self.sequences.popitem(last=False)[1]

    def remove(self, sequence: Sequence) -> bool:
        return self.sequences.pop(sequence.request_id, None) is not None

    def first(self, count: int, now: float) -> list[Sequence]:
        return [sequence for sequence, _ in zip(self.sequences.values(), range(count), strict=False)]


class BySla:
    """Queue of ``waiting_order: sla``: by class, slack, cost, affinity and age.

    A sequence that comes again keeps its arrival, and so its place.
    """

    def __init__(self, core: EngineCore) -> None:
        assert core.order is not None
        self.queue = WaitingQueue(core.order)
        self._core = core
        self.sequences: dict[str, Sequence] = {}
        self._next: tuple[float, Placed] | None = None  # of the last `peek`, while the queue is as it was

    def push(self, sequence: Sequence, now: float, *, again: bool = False) -> None:
        self.sequences[sequence.request_id] = sequence
        items = sequence.items
        request = self._core.waiting_request(
            sequence.request_id, sequence.computed, sequence.left, items[:AFFINITY_ITEMS], len(items), now
        )
        self.queue.push(request, now)
        self._next = None

    def peek(self, now: float) -> Sequence | None:
        placed = self.queue.peek(now)
        if placed is None:
            return None
        self._next = now, placed
        return self.sequences[placed.request.request_id]

    def pop(self, now: float) -> Sequence:
        if self._next is None or self._next[0] != now:
            self.peek(now)
        assert self._next is not None
        placed, self._next = self._next[1], None
        self.queue.take(placed)
        return self.sequences.pop(placed.request.request_id)

    def remove(self, sequence: Sequence) -> bool:
        if self.sequences.pop(sequence.request_id, None) is None:
            return False
        self.queue.remove(sequence.request_id)
        self._next = None
        return True

    def first(self, count: int, now: float) -> list[Sequence]:
        ordered = self.queue.ordered(now)
        return [self.sequences[one.request_id] for one, _ in zip(ordered, range(count), strict=False)]


def make_queue(core: EngineCore) -> ByArrival | BySla:
    """Return an empty queue in the order that the core's options ask for."""
    return ByArrival() if core.order is None else BySla(core)

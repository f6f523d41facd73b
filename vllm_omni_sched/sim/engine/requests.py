"""Keep the requests of an engine: those that wait, by arrival or by SLA, and those that decode."""

import math
from collections import OrderedDict
from collections.abc import Sequence as Many
from heapq import heappop, heappush

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.requests import PromptItem
from vllm_omni_sched.graph.affinity import AFFINITY_ITEMS
from vllm_omni_sched.graph.order import Placed, SlaClass
from vllm_omni_sched.graph.waiting_queue import WaitingQueue
from vllm_omni_sched.sim.measure import Gaps
from vllm_omni_sched.sim.work import Job


class Sequence:
    """Follows a request in the engine, from its first wait to its last token.

    ``prompt``: tokens to compute before the next one is made; after a preemption including the output tokens made
    already. ``computed``: of these. ``made``: output tokens. ``runs``: whether it was admitted. ``next_item``: the
    first item that is not computed. ``held``: content of the items that it holds in the encoder cache. ``last_token``:
    time of the last one; ``first_step``: the first step in which it decodes since.
    """

    __slots__ = (
        "_own",
        "computed",
        "entered",
        "first_step",
        "held",
        "items",
        "job",
        "largest_gap",
        "last_token",
        "made",
        "next_item",
        "output_tokens",
        "prompt",
        "request_id",
        "runs",
        "sla",
    )

    def __init__(self, job: Job, sla: SlaClass, entered: float) -> None:
        request = job.request
        self.job = job
        self.request_id = request.name
        self.sla = sla
        self.entered = entered
        items, at = [], 0
        for item in request.items:
            items.append(PromptItem(str(item.content), item.modality, item.embeds, at))
            at += item.embeds
        self.items: tuple[PromptItem, ...] = tuple(items)
        self._own = self.prompt = max(at + request.text_tokens, 1)
        self.output_tokens = request.output_tokens
        self.computed = 0
        self.made = 0
        self.next_item = 0
        self.held: list[str] = []
        self.runs = False
        self.last_token: float | None = None
        self.first_step = 0
        self.largest_gap = 0.0

    is_session = False

    @property
    def has_items(self) -> bool:
        """Return whether it has any item."""
        return bool(self.items)

    @property
    def left(self) -> int:
        """Return the tokens of its prompt still to compute."""
        return self.prompt - self.computed

    def items_within(self, start: int, tokens: int) -> Many[PromptItem]:
        """Return the items that ``tokens`` from ``start`` need, without those that are computed."""
        items, first = self.items, self.next_item
        until, last = start + tokens, first
        while last < len(items) and items[last].start < until:
            last += 1
        return items[first:last]

    def restart(self) -> None:
        """Reset a preempted sequence: its prompt and output tokens are to be computed again."""
        self.prompt = self._own + self.made
        self.computed = 0
        self.next_item = 0
        self.runs = False


class Targets:
    """Counts of each latency target, to find the tightest one without a scan.

    ``least``: the tightest one; ``inf`` if there is none.
    """

    __slots__ = ("counts", "least")

    def __init__(self) -> None:
        self.counts: dict[float, int] = {}
        self.least = math.inf

    def add(self, seconds: float) -> None:
        """Add one request with this target."""
        self.counts[seconds] = self.counts.get(seconds, 0) + 1
        if seconds < self.least:
            self.least = seconds

    def remove(self, seconds: float) -> None:
        """Remove one request with this target."""
        left = self.counts[seconds] - 1
        if left:
            self.counts[seconds] = left
        else:
            del self.counts[seconds]
            self.least = min(self.counts, default=math.inf)

    def clear(self) -> None:
        """Remove all requests."""
        self.counts.clear()
        self.least = math.inf


class DecodingSequences(Gaps):
    """Models the sequences that decode. A step takes the same work for any number: ends are known at the start.

    ``number``: how many. ``context``: tokens in the KV cache of all of them; grows by their number in each
    step. ``ends``: a heap of (number of steps after which a sequence ends, number of its request, how many came before
    it, sequence); outdated entries are skipped. ``targets``: of their inter-token latency.
    """

    __slots__ = ("_added", "_next_end", "context", "ends", "number", "sequences", "targets")

    def __init__(self) -> None:
        super().__init__()
        self.sequences: dict[str, Sequence] = {}  # in the order in which they began to decode
        self.number = 0
        self._added = 0
        self.context = 0
        self.ends: list[tuple[int, int, int, Sequence]] = []
        self.targets = Targets()
        self._next_end = 0  # step before which none ends

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that has its first token and is to make more."""
        sequence.first_step = self.mark()
        self.sequences[sequence.request_id] = sequence
        self.number += 1
        self.context += sequence.computed
        self.targets.add(sequence.sla.itl_seconds)
        left = sequence.output_tokens - sequence.made
        self._added += 1  # a withdrawn request that is here again has an old entry
        heappush(self.ends, (self.steps + left, sequence.job.request.number, self._added, sequence))
        self._next_end = self.ends[0][0]

    def step(self, seconds: float) -> bool:
        """Give each sequence one token, after so many seconds; return whether any may have `finished`."""
        self.context += self.number
        if seconds > self.largest:
            self.largest = seconds
        self.steps = steps = self.steps + 1
        return self._next_end <= steps

    def finished(self) -> list[Sequence]:
        """Remove and return the sequences that made their last token."""
        ends, done = self.ends, []
        while ends and ends[0][0] <= self.steps:
            step, _, _, sequence = heappop(ends)
            if (
                self.sequences.get(sequence.request_id) is sequence
                and sequence.first_step + self._left(sequence) == step
            ):
                self.remove(sequence)
                done.append(sequence)
        if ends:
            self._next_end = ends[0][0]
        return done

    @staticmethod
    def _left(sequence: Sequence) -> int:
        return sequence.output_tokens - sequence.made

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, and update its tokens and its largest gap."""
        del self.sequences[sequence.request_id]
        self.number -= 1
        self.targets.remove(sequence.sla.itl_seconds)
        made = self.steps - sequence.first_step
        sequence.largest_gap = max(sequence.largest_gap, self.largest_since(sequence.first_step))
        sequence.computed += made
        sequence.made += made
        self.context -= sequence.computed

    def last(self) -> Sequence:
        """Return the sequence that began last."""
        return next(reversed(self.sequences.values()))


class Waiting:
    """The waiting sequences by name: first come, first served; one that comes again goes to the front."""

    def __init__(self) -> None:
        self.sequences: OrderedDict[str, Sequence] = OrderedDict()

    def push(self, sequence: Sequence, now: float, *, again: bool = False) -> None:
        """Add a sequence; ``again``: it ran before, or was held back."""
        self.sequences[sequence.request_id] = sequence
        if again:
            self.sequences.move_to_end(sequence.request_id, last=False)

    def peek(self, now: float) -> Sequence | None:
        """Return the next sequence, None if the queue is empty."""
        return next(iter(self.sequences.values()), None)

    def pop(self, now: float) -> Sequence:
        """Remove and return the sequence that `peek` returns."""
        return self.sequences.popitem(last=False)[1]

    def remove(self, sequence: Sequence) -> bool:
        """Remove a sequence, and return whether it waited here."""
        return self.sequences.pop(sequence.request_id, None) is not None

    def first(self, count: int, now: float) -> list[Sequence]:
        """Return at most the first ``count`` sequences for a plan."""
        return [sequence for sequence, _ in zip(self.sequences.values(), range(count), strict=False)]


class BySla(Waiting):
    """Queue of ``waiting_order: sla``: by class, slack, cost, affinity and age.

    A sequence that comes again keeps its arrival, and so its place.
    """

    def __init__(self, core: EngineCore) -> None:
        super().__init__()
        assert core.order is not None
        self.queue = WaitingQueue(core.order)
        self._core = core
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


def make_queue(core: EngineCore) -> Waiting:
    """Return an empty queue in the order that the core's options ask for."""
    return Waiting() if core.order is None else BySla(core)

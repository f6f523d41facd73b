"""Keep the decoding requests, for each of which every step makes a token."""

import math
from heapq import heappop, heappush

from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.measure import Gaps


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

"""Those that decode: every step makes a token for each of them."""

from heapq import heappop, heappush

from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.measure import Gaps


class Targets:
    """How many there are of each target; for the tightest of them without looking at all."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: dict[float, int] = {}

    def add(self, seconds: float) -> None:
        """One more has this one."""
        self.counts[seconds] = self.counts.get(seconds, 0) + 1

    def remove(self, seconds: float) -> None:
        """One less."""
        left = self.counts[seconds] - 1
        if left:
            self.counts[seconds] = left
        else:
            del self.counts[seconds]


class Decodes(Gaps):
    """Sequences that decode. A step costs the same, however many they are: who ends when is known when it begins.

    ``number``: of them. ``context``: tokens in the KV cache of all of them together; grows by their number in each
    step. ``ends``: a heap of (number of steps after which a sequence ends, number of its request, how many came before
    it, sequence); what is no longer so is passed over. ``targets``: of their inter-token latency.
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
        self._next_end = 0  # step; nobody ends before it

    def add(self, sequence: Sequence) -> None:
        """It has its first token, and is to make more."""
        sequence.first_step = self.mark()
        self.sequences[sequence.name] = sequence
        self.number += 1
        self.context += sequence.computed
        self.targets.add(sequence.sla.itl_seconds)
        left = sequence.output_tokens - sequence.made
        self._added += 1  # a request that was taken back and is here again has an entry of before
        heappush(self.ends, (self.steps + left, sequence.job.request.number, self._added, sequence))
        self._next_end = self.ends[0][0]

    def step(self, seconds: float) -> bool:
        """Each has one more token, after so many seconds; whether somebody may have `finished`."""
        self.context += self.number
        if seconds > self.largest:
            self.largest = seconds
        self.steps = steps = self.steps + 1
        return self._next_end <= steps

    @property
    def sure_steps(self) -> int:
        """So many steps, and in the last of them somebody may have finished."""
        return self._next_end - self.steps

    def pass_steps(self, seconds: list[float]) -> None:
        """Steps, one at least, in which nobody finished."""
        self.steps += len(seconds)
        self.context += len(seconds) * self.number
        self.largest = max(self.largest, max(seconds))

    def finished(self) -> list[Sequence]:
        """Those that made their last token; they are here no more."""
        ends, done = self.ends, []
        while ends and ends[0][0] <= self.steps:
            step, _, _, sequence = heappop(ends)
            if self.sequences.get(sequence.name) is sequence and sequence.first_step + self._left(sequence) == step:
                self.remove(sequence)
                done.append(sequence)
        if ends:
            self._next_end = ends[0][0]
        return done

    @staticmethod
    def _left(sequence: Sequence) -> int:
        return sequence.output_tokens - sequence.made

    def remove(self, sequence: Sequence) -> None:
        """It decodes no more; what it has made and its largest gap are brought up to date."""
        del self.sequences[sequence.name]
        self.number -= 1
        self.targets.remove(sequence.sla.itl_seconds)
        made = self.steps - sequence.first_step
        sequence.largest_gap = max(sequence.largest_gap, self.largest_since(sequence.first_step))
        sequence.computed += made
        sequence.made += made
        self.context -= sequence.computed

    def last(self) -> Sequence:
        """The one that began last."""
        return next(reversed(self.sequences.values()))

"""Those that decode: every step makes a token for each of them."""

from heapq import heappop, heappush

from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.measure import Gaps


class Decodes:
    """Sequences that decode. A step costs the same, however many they are: who ends when is known when it begins.

    ``context``: tokens in the KV cache of all of them together; grows by their number in each step. ``gaps``: the
    steps. ``ends``: a heap of (number of steps after which a sequence ends, number of its request, sequence); what is
    no longer so is passed over.
    """

    __slots__ = ("context", "ends", "gaps", "sequences")

    def __init__(self) -> None:
        self.sequences: dict[str, Sequence] = {}  # in the order in which they began to decode
        self.context = 0
        self.gaps = Gaps()
        self.ends: list[tuple[int, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """It has its first token, and is to make more."""
        sequence.first_step = self.gaps.steps
        self.sequences[sequence.name] = sequence
        self.context += sequence.computed
        left = sequence.output_tokens - sequence.made
        heappush(self.ends, (self.gaps.steps + left, sequence.job.request.number, sequence))

    def finished(self) -> list[Sequence]:
        """Those that made their last token; they are here no more."""
        ends, done = self.ends, []
        while ends and ends[0][0] <= self.gaps.steps:
            step, _, sequence = heappop(ends)
            if self.sequences.get(sequence.name) is sequence and sequence.first_step + self._left(sequence) == step:
                self.remove(sequence)
                done.append(sequence)
        return done

    @staticmethod
    def _left(sequence: Sequence) -> int:
        return sequence.output_tokens - sequence.made

    def remove(self, sequence: Sequence) -> None:
        """It decodes no more; what it has made and its largest gap are brought up to date."""
        del self.sequences[sequence.name]
        made = self.gaps.steps - sequence.first_step
        sequence.largest_gap = max(sequence.largest_gap, self.gaps.largest_since(sequence.first_step))
        sequence.computed += made
        sequence.made += made
        self.context -= sequence.computed

    def last(self) -> Sequence:
        """The one that began last."""
        return next(reversed(self.sequences.values()))

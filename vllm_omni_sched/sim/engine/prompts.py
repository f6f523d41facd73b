"""Decide which prompts are computed in a step, and how much of each."""

from vllm_omni_sched.resource.encoder_budget import EncoderBudgetPlan, ModalityDemand
from vllm_omni_sched.resource.fair import LOOK_AHEAD, longest_piece
from vllm_omni_sched.sim.engine.ahead import Ahead
from vllm_omni_sched.sim.engine.decoding import Decodes, Targets
from vllm_omni_sched.sim.engine.encoding import Encoding
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.policies import EnginePolicies
from vllm_omni_sched.sim.engine.rounds import Rounds
from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.engine.waiting import Waiting


class Prompts:
    """Chunked prefill as in vLLM: running requests first, then waiting ones while there is room.

    1. A step has ``max_num_batched_tokens``; decoding requests take one each, prompts the rest, bounded by
       ``prefill_control`` while requests decode and by ``pieces`` while several want more than there is.
    2. A chunk ends before an item that cannot be encoded in this step.
    3. Waiting requests are admitted while the limits of sequences and of KV memory hold, in queue order; the first
       one without room ends it. A request whose items are in the lane is held, and others go ahead of it.
    4. With ``encode_rounds`` a chunk also ends before an item that is held back; others go ahead of a request with no
       other token to compute.

    ``running``: sequences whose prompt is being computed, in order of admission. ``chunks``: of the step.
    """

    def __init__(
        self,
        limits: EngineLimits,
        policies: EnginePolicies,
        waiting: Waiting,
        decodes: Decodes,
        encoding: Encoding,
    ) -> None:
        self._limits, self._policies = limits, policies
        self._waiting, self._decodes, self._encoding = waiting, decodes, encoding
        self.ahead: Ahead | None = None
        self.rounds = Rounds(limits, policies, decodes, encoding) if policies.rounds is not None else None
        self.running: list[Sequence] = []
        self.targets = Targets()  # of their inter-token latency
        self.computed = 0  # tokens in their KV cache
        self.chunks: list[tuple[Sequence, int]] = []
        self.tokens = 0
        self.pairs = 0.0

    def clear(self) -> None:
        """Compute no prompt in this step."""
        self.chunks, self.tokens, self.pairs = [], 0, 0.0

    @property
    def kv_tokens(self) -> int:
        """Return the tokens in the KV cache, of all requests."""
        return self._decodes.context + self.computed

    def room(self) -> bool:
        """Return whether one more request may run."""
        return self._decodes.number + len(self.running) < self._limit()

    def _limit(self) -> int:
        most = self._limits.max_num_seqs
        if self._policies.batch is not None:
            most = min(most, max(self._policies.batch.limit, self._decodes.number + len(self.running)))
        return most

    def plan(self, now: float) -> None:
        """Fill ``chunks`` for a step."""
        self.clear()
        decoding = self._decodes.number
        budget = self._limits.max_num_batched_tokens - decoding
        if self._policies.prefill is not None and decoding:
            budget = min(budget, self._policies.prefill.limit)
        longest = self._longest(budget, now)
        if self.rounds is not None:
            few = self._waiting.first(min(LOOK_AHEAD, max(self._limit() - decoding - len(self.running), 0)), now)
            budget = self.rounds.begin(self.running, few, budget, now)
            longest = min(longest, self.rounds.longest(budget))
        self._encoding.begin(self._encoder_plan(decoding > 0, now))
        for sequence in list(self.running):
            if budget <= 0:
                break
            if self.ahead is not None:
                self.ahead.may_run(sequence, alone=False)
            budget -= self._compute(sequence, min(budget, longest), now)
        limit = self._limit()
        passed: list[Sequence] = []  # by rule 4
        while budget > 0 and decoding + len(self.running) < limit:
            one = self._waiting.peek(now)
            if one is None or not self._fits(one):
                break
            if self.ahead is not None and not self.ahead.may_run(one, self._alone()):
                self.ahead.hold(self._waiting.pop(now))
                continue
            tokens = self._compute(one, min(budget, longest), now)
            if not tokens:
                if self.rounds is None or not self.rounds.stops(one) or len(passed) == LOOK_AHEAD:
                    break
                passed.append(self._waiting.pop(now))
                continue
            budget -= tokens
            self._waiting.pop(now)
            self.running.append(one)
            self.targets.add(one.sla.itl_seconds)
        for one in reversed(passed):
            self._waiting.push(one, now, again=True)

    def _alone(self) -> bool:
        held = len(self.ahead.held) if self.ahead is not None else 0
        return self._decodes.number + len(self.running) + len(self._waiting.sequences) + held <= 1

    def _fits(self, sequence: Sequence) -> bool:
        left = sum(one.prompt - one.computed for one in self.running)
        return self.kv_tokens + left + sequence.prompt <= self._limits.kv_tokens

    def _longest(self, budget: int, now: float) -> int:
        if not self._policies.config.pieces:
            return budget
        wanted = [one.prompt - one.computed for one in self.running]
        wanted += [one.prompt - one.computed for one in self._waiting.first(LOOK_AHEAD, now)]
        if len(wanted) < 2 or sum(wanted) <= budget:
            return budget
        return longest_piece(wanted, max(budget, 1))

    def _encoder_plan(self, decoding: bool, now: float) -> EncoderBudgetPlan | None:
        split = self._policies.split
        if split is None:
            return None
        sizes: dict[str, tuple[int, list[int]]] = {}
        for order, one in enumerate((*self.running, *self._waiting.first(LOOK_AHEAD, now))):
            for i in one.window(self._limits.max_num_batched_tokens):
                sizes.setdefault(one.items[i].modality, (order, []))[1].append(max(one.items[i].embeds, 1))
        demands = [ModalityDemand(m, sum(of), max(of), of[0], order) for m, (order, of) in sizes.items()]
        if not demands or max(one.largest_embeds for one in demands) > split.profiled_embeds:
            return None
        wanted = split.profiled_embeds
        seconds = sum(self._policies.costs.encode_seconds(one.modality, one.total_embeds) for one in demands)
        if decoding and seconds:
            wanted = int(sum(one.total_embeds for one in demands) * self._policies.itl_target_seconds / seconds)
        return split.plan(wanted, demands)

    def _compute(self, sequence: Sequence, most: int, now: float) -> int:
        """Add tokens of the prompt to this step, and return how many."""
        tokens = min(sequence.prompt - sequence.computed, most)
        if sequence.limit is not None:
            tokens = max(0, min(tokens, sequence.limit - sequence.computed))
        rounds = self.rounds
        for i in sequence.window(tokens):
            held = rounds is not None and not rounds.encodes(sequence, sequence.items[i])
            if held or not self._encoding.take(sequence, sequence.items[i], now):
                tokens = max(sequence.starts[i] - sequence.computed, 0)
                break
        if rounds is not None and tokens:
            tokens = rounds.cut(sequence, tokens)
        if tokens:
            self.chunks.append((sequence, tokens))
            self.tokens += tokens
            self.pairs += tokens * (sequence.computed + tokens / 2)
        return tokens

    def done(self) -> list[Sequence]:
        """End the step; remove and return the sequences whose prompt is computed."""
        whole = []
        for sequence, tokens in self.chunks:
            if sequence not in self.running:  # aborted meanwhile
                continue
            sequence.computed += tokens
            self.computed += tokens
            items, at = sequence.items, sequence.next_item
            while at < len(items) and sequence.starts[at] + items[at].embeds <= sequence.computed:
                at += 1
            if at > sequence.next_item:
                sequence.next_item = at
                self._encoding.release(sequence, at)
            if sequence.computed >= sequence.prompt:
                self.remove(sequence)
                whole.append(sequence)
        return whole

    def forget(self) -> None:
        """Forget all state of an engine that died."""
        self.running.clear()
        self.targets.counts.clear()
        self.computed = 0
        if self.rounds is not None:
            self.rounds.forget()
        self.clear()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence whose prompt is computed or aborted."""
        self.running.remove(sequence)
        self.targets.remove(sequence.sla.itl_seconds)
        self.computed -= sequence.computed

"""Model the prompts of an engine's steps: chunked prefill, within the limits that the core sets."""

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.requests import EngineView
from vllm_omni_sched.sim.engine.ahead import Ahead
from vllm_omni_sched.sim.engine.decoding import DecodingSequences, Targets
from vllm_omni_sched.sim.engine.encoding import Encoding
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.engine.waiting import Waiting


class Prompts:
    """Models chunked prefill as in vLLM: running requests first, then waiting ones while there is room.

    1. A step has ``max_num_batched_tokens``; decoding requests take one each, prompts the rest, within the limits of
       `EngineCore.begin_step`.
    2. A chunk ends before an item that cannot be encoded in this step.
    3. Waiting requests are admitted while the limits of sequences and of KV memory hold, and as far as a loan to
       encodes leaves room, in queue order; the first one without room or without tokens ends it. Others go ahead of a
       request that the core holds back.

    ``running``: sequences whose prompt is being computed, in order of admission. ``chunks``: of the step.
    """

    def __init__(
        self,
        limits: EngineLimits,
        core: EngineCore,
        waiting: Waiting,
        decodes: DecodingSequences,
        encoding: Encoding,
    ) -> None:
        self._limits, self._core = limits, core
        self._waiting, self._decodes, self._encoding = waiting, decodes, encoding
        self.ahead: Ahead | None = None
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

    @property
    def kv_room(self) -> int:
        """Return the tokens of KV cache that are not lent to encodes."""
        lending = self._core.lending
        return self._limits.kv_tokens - (lending.lent_blocks if lending is not None else 0)

    def room(self) -> bool:
        """Return whether one more request may run."""
        running = self._decodes.number + len(self.running)
        if self._core.limits.batch is None:
            return running < self._limits.max_num_seqs
        return running < self._core.limits.max_requests(self._limits.max_num_seqs, running)

    def plan(self, view: EngineView, now: float) -> None:
        """Fill ``chunks`` for a step."""
        self.clear()
        limits, core, decoding = self._limits, self._core, self._decodes.number
        plan = core.begin_step(view, limits.max_num_seqs, limits.max_num_batched_tokens, now)
        budget = plan.max_tokens - decoding
        self._encoding.begin(plan.encoder_embeds)
        ahead = core.ahead
        for one in list(self.running):
            if budget <= 0:
                break
            if ahead is None or ahead.next_chunk(one, one.computed, view, now).may_run:
                budget -= self._compute(one, min(budget, plan.longest), view, now)
        aside: list[Sequence] = []
        while budget > 0 and decoding + len(self.running) < plan.max_requests:
            waiting = self._waiting.peek(now)
            if waiting is None or not self.fits(waiting):
                break
            if waiting.request_id in plan.aside:
                aside.append(self._waiting.pop(now))
                continue
            if ahead is not None and not ahead.next_chunk(waiting, waiting.computed, view, now).may_run:
                assert self.ahead is not None
                self.ahead.hold(self._waiting.pop(now))
                continue
            if not self._leaves_room(waiting):
                break
            tokens = self._compute(waiting, min(budget, plan.longest), view, now)
            if not tokens:
                break
            budget -= tokens
            self._waiting.pop(now)
            self._admitted(waiting)
            waiting.runs = True
            self.running.append(waiting)
            self.targets.add(waiting.sla.itl_seconds)
        for one in reversed(aside):
            self._waiting.push(one, now, again=True)
        if core.rounds is not None:
            core.rounds.end()

    def _leaves_room(self, sequence: Sequence) -> bool:
        """Return whether a sequence for which there is room may run beside what is lent to encodes."""
        lending = self._core.lending
        return lending is None or lending.may_admit(sequence, sequence.prompt)

    def _admitted(self, sequence: Sequence) -> None:
        """Report that a sequence runs, or has its room reserved."""
        if self._core.lending is not None:
            self._core.lending.admitted(sequence, sequence.prompt)

    def fits(self, sequence: Sequence) -> bool:
        """Return whether the KV cache has room for one more prompt."""
        left = sum([one.left for one in self.running])
        return self.kv_tokens + left + sequence.prompt <= self.kv_room

    def _compute(self, sequence: Sequence, most: int, view: EngineView, now: float) -> int:
        """Add tokens of the prompt to this step, and return how many."""
        core, computed = self._core, sequence.computed
        tokens = min(sequence.left, most)
        if core.ahead is not None:
            tokens = core.ahead.cut(sequence.request_id, computed, tokens)
        if core.rounds is not None:
            tokens = core.rounds.cut(sequence, computed, tokens, view, self._encoding.left)
        for item in sequence.items_within(computed, tokens):
            if not self._encoding.take(sequence, item, now):
                tokens = max(item.start - computed, 0)
                break
        if tokens:
            self.chunks.append((sequence, tokens))
            self.tokens += tokens
            self.pairs += tokens * (computed + tokens / 2)
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
            while at < len(items) and items[at].start + items[at].embeds <= sequence.computed:
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
        self.targets.clear()
        self.computed = 0
        self.clear()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence whose prompt is computed or aborted."""
        self.running.remove(sequence)
        self.targets.remove(sequence.sla.itl_seconds)
        self.computed -= sequence.computed

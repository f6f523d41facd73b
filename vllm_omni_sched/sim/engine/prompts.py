"""Model the prompts of an engine's steps, chunked prefill within the limits that the core sets, and their encodes."""

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.requests import EngineView, PromptItem
from vllm_omni_sched.sim.engine.lane import Ahead
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.requests import DecodingSequences, Sequence, Targets, Waiting


class Encoding:
    """The encoder cache, and the encoder's part of the step that is being planned.

    1. A content is encoded once while it is in the cache, for all requests.
    2. A step encodes at most its budget, and each item whole.
    3. Items that a running request needs stay; of the others, the one that has been unused
       for longest is evicted when room is needed.
    4. Items that the lane has ready are moved into the cache, and not encoded.

    ``step``: by modality, items and embeddings that this step encodes. ``left``: embeddings that it may still encode.
    ``has``: whether a content is in the cache.
    """

    def __init__(self, limits: EngineLimits, core: EngineCore) -> None:
        self._limits, self._core = limits, core
        self._ahead = core.ahead
        self._embeds: dict[str, int] = {}
        self._freeable: dict[str, None] = {}  # contents that nobody holds, in the order of becoming so
        self.has = self._embeds.__contains__
        self._used = 0
        self._holders: dict[str, int] = {}  # content -> sequences that hold its encoding
        self._held = 0  # embeddings that are held
        self.left = 0
        self.step: dict[str, list[int]] = {}
        self.hits = 0
        self.encoded = 0

    @property
    def free_embeds(self) -> int:
        """Return the room after all possible evictions."""
        return self._limits.encoder_cache_embeds - self._held

    def begin(self, embeds: int | None = None) -> None:
        """Begin to plan a step that may encode so many embeddings; None for the engine's own limit."""
        self.step = {}
        self.left = self._limits.encoder_budget_embeds if embeds is None else embeds

    def take(self, sequence: Sequence, item: PromptItem, now: float) -> bool:
        """Return whether this step can compute the tokens of an item; if so, the sequence holds its encoding."""
        content = item.content
        if not self._limits.encodes or content in sequence.held:
            return True
        if content in self._embeds:
            self._freeable.pop(content, None)
            self.hits += 1
        elif not self._make(item, now):
            return False
        sequence.held.append(content)
        holders = self._holders.get(content, 0)
        self._holders[content] = holders + 1
        if not holders:
            self._held += self._embeds[content]
        return True

    def _make(self, item: PromptItem, now: float) -> bool:
        content, modality, embeds = item.content, item.modality, item.embeds
        ready = self._ahead is not None and self._ahead.is_ready(content)
        if not ready and embeds > self.left:
            return False
        if not self._room(embeds):
            return False
        self._embeds[content] = embeds
        self._used += embeds
        if ready:
            assert self._ahead is not None
            self._ahead.load(content, now)
            return True
        self.encoded += 1
        self.left -= embeds
        counts = self.step.setdefault(modality, [0, 0])
        counts[0] += 1
        counts[1] += embeds
        return True

    def _room(self, embeds: int) -> bool:
        while self._used + embeds > self._limits.encoder_cache_embeds:
            victim = next(iter(self._freeable), None)
            if victim is None:
                return False
            del self._freeable[victim]
            self._used -= self._embeds.pop(victim)
        return True

    def release(self, sequence: Sequence, upto: int | None = None) -> None:
        """Release the first so many items of a sequence, which are computed, or all if it has ended."""
        if not sequence.held:
            return
        gone = {item.content for item in sequence.items[:upto]} - {
            item.content for item in (sequence.items[upto:] if upto is not None else ())
        }
        for content in [one for one in sequence.held if one in gone]:
            sequence.held.remove(content)
            holders = self._holders.pop(content) - 1
            if holders:
                self._holders[content] = holders
            else:
                self._held -= self._embeds[content]
                self._freeable[content] = None

    def clear(self) -> None:
        """Empty the cache of an engine that died."""
        self._embeds.clear()
        self._freeable.clear()
        self._holders.clear()
        self._used = self._held = 0


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

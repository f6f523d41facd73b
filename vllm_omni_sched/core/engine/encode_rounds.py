"""Encode items in rounds: which are held back until decoding requests are finished."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.history import History, Transition
from vllm_omni_sched.core.engine.ledger import LEAST_PIECE
from vllm_omni_sched.core.engine.requests import EngineFacts, EngineView, Prompt, PromptItem, RequestBook
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.step_times import CostModel, StepMeter
from vllm_omni_sched.resource.engine.encode_rounds import (
    HOLDS,
    EncodeRounds,
    PromptWork,
    RoundReason,
    RoundSnapshot,
    RoundStep,
)
from vllm_omni_sched.resource.engine.pieces import LOOK_AHEAD


class RoundLimits(NamedTuple):
    """Limits that rounds set for a step.

    ``prompt_tokens``: of all prompts together. ``longest``: tokens of one prompt. ``aside``: waiting requests that
    would be held again before they have a token to compute.
    """

    prompt_tokens: int
    longest: int
    aside: frozenset[str]


class RoundScheduling:
    """Asks `EncodeRounds` about the items that a step would encode, and ends chunks before those it holds.

    1. At most `LOOK_AHEAD` waiting requests are considered in a step, with the items of their next chunk, and no more
       than may be admitted.
    2. A waiting request that was held is set aside in the steps that would hold it again, so that the requests behind
       it are considered.
    3. A chunk of a waiting request that would end within `LEAST_PIECE` tokens is not begun.
    4. No token is left out of a prompt that has no items or must not be split, nor of a session, whose answer goes on.
    """

    def __init__(
        self,
        config: OmniSchedConfig,
        facts: EngineFacts,
        book: RequestBook,
        costs: CostModel,
        steps: StepMeter,
        metrics: SchedulerMetrics,
        history: History | None,
    ) -> None:
        self._splits = facts.splits_prompts
        self._book, self._costs, self._steps = book, costs, steps
        self._metrics, self._history = metrics, history
        self.policy = EncodeRounds(config.max_wait_seconds, config.prefill_min_tokens)
        self._step: RoundStep | None = None
        self._held: dict[str, int] = {}  # waiting requests -> tokens that are computed or in the prefix cache
        self._now = 0.0

    def begin(self, view: EngineView, max_requests: int, budget: int, window: int, now: float) -> RoundLimits:
        """Plan a step that may have ``budget`` prompt tokens; ``window``: tokens of the longest chunk."""
        self._now, self._step = now, None
        prompts, waiting = view.prompts(), view.waiting(LOOK_AHEAD)
        room, left, works = view.free_embeds, budget, []
        for one in (*prompts, *waiting[: max(max_requests - view.num_running, 0)]):
            missing = list(self._missing(view, one, one.computed, window))
            room -= sum(item.embeds for item in missing)
            if room >= 0 or not missing:  # otherwise the engine holds the request back
                works.append(self._work(one, missing, reached=left > 0))
            left -= one.left
        if not works:
            return RoundLimits(budget, budget, frozenset())
        decodes = view.decodes()
        base, each = self._steps.predict(0), self._steps.seconds_per_token
        snapshot = RoundSnapshot(*decodes, tuple(works), max(budget, 0), base, each)
        step = self._step = self.policy.step(snapshot, now)
        aside = frozenset(one.request_id for one in waiting if self._stays_held(view, step, one))
        tokens = min(step.prompt_tokens, budget)
        pieces = len(prompts) + step.joining
        longest = max(budget // pieces, 1) if self._splits and step.gathers and pieces > 1 else budget
        return RoundLimits(tokens, longest, aside)

    def end(self) -> None:
        """End the decisions of a step."""
        self._step = None

    def _work(self, prompt: Prompt, missing: Sequence[PromptItem], *, reached: bool) -> PromptWork:
        return PromptWork(
            prompt.request_id,
            sum(self._seconds(item) for item in missing),
            self._costs.prefill_seconds(max(prompt.left, 0)),
            self._book.deadline(prompt.request_id),
            prompt.runs,
            reached,
        )

    def _seconds(self, item: PromptItem) -> float:
        return self._costs.encode_seconds(item.modality, item.embeds)

    @staticmethod
    def _missing(view: EngineView, prompt: Prompt, start: int, tokens: int) -> Iterator[PromptItem]:
        return (item for item in prompt.items_within(start, tokens) if not view.has_encoding(item.content))

    def _stays_held(self, view: EngineView, step: RoundStep, prompt: Prompt) -> bool:
        """Return whether a waiting request would be held again before it has a token to compute."""
        start = self._held.get(prompt.request_id)
        if start is None:
            return False
        first = next(self._missing(view, prompt, start, LEAST_PIECE), None)
        if first is None or not step.holds(prompt.request_id, self._seconds(first)):
            del self._held[prompt.request_id]
            return False
        self._metrics.encode_rounds[RoundReason.HELD.value] += 1
        return True

    def cut(
        self, prompt: Prompt, start: int, tokens: int, view: EngineView, encoder_budget: int, shift: int = 0
    ) -> int:
        """Return how many tokens of a chunk may be computed: those before the first held item.

        ``encoder_budget``: embeddings that this step may still encode. ``shift``: tokens that a drafter reads ahead,
        which must not reach the item either.
        """
        step, left = self._step, prompt.computed + prompt.left - start
        if step is None or tokens <= 0 or left <= 0:
            return tokens
        request_id = prompt.request_id
        deadline, seconds = self._book.deadline(request_id), self._costs.prefill_seconds(left)
        room, asked = min(view.free_embeds, encoder_budget), set[str]()
        for item in self._missing(view, prompt, start, tokens + shift):
            if item.content in asked:
                continue
            room -= item.embeds
            if room < 0:  # the engine ends the chunk here
                break
            asked.add(item.content)
            reason = step.encode(request_id, self._seconds(item), seconds, deadline)
            self._count(request_id, reason)
            if reason in HOLDS:
                piece = max(item.start - start - shift, 0)
                if piece < LEAST_PIECE and not prompt.runs:
                    self._held[request_id] = start
                    return 0
                return min(tokens, piece)
        if tokens < left or prompt.made or prompt.is_session or not prompt.has_items or not self._splits:
            return tokens
        if tokens == 1 and not prompt.runs:  # a waiting request would be left without a token
            return tokens
        if not step.first_token_waits(seconds, deadline):
            return tokens
        self._count(request_id, RoundReason.DRAINS)
        return tokens - 1

    def _count(self, request_id: str, reason: RoundReason) -> None:
        self._metrics.encode_rounds[reason.value] += 1
        if self._history is not None:
            self._history.add(self._now, Transition.ROUND, request_id, reason.value)

    def holds(self, request_id: str) -> bool:
        """Return whether a waiting request was held back in its last step."""
        return request_id in self._held

    def leave(self, request_id: str, tokens: int) -> None:
        """Drop a request that ended with so many output tokens; 0 for one that was withdrawn."""
        self._held.pop(request_id, None)
        self.policy.ended(request_id, tokens)

    def forget(self) -> None:
        """Forget all requests, after a reset of the engine."""
        self._step = None
        self._held.clear()
        self.policy.forget()

    def validate(self, book: RequestBook) -> None:
        """Check the invariants; for tests and debugging.

        Raises:
            AssertionError: names the invariant that is broken.
        """
        assert all(one in book for one in self._held), "a request that has left is held"
        assert self.policy.num_held <= len(book), "more requests are held than are in the engine"

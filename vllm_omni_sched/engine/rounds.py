"""Encoding in rounds on vLLM's scheduler: shows its state to `EncodeRounds`, and applies the decisions."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_omni_sched import compat
from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.core.engine.ledger import LEAST_PIECE
from vllm_omni_sched.engine.prompt_tokens import prompt_tokens_of
from vllm_omni_sched.engine.sla import SlaBook
from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.items import FeatureList
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.step_times import StepMeter
from vllm_omni_sched.resource.encode_rounds import (
    HOLDS,
    EncodeRounds,
    PromptWork,
    RoundReason,
    RoundSnapshot,
    RoundStep,
)
from vllm_omni_sched.resource.fair import LOOK_AHEAD


def refuse_rounds(config: OmniSchedConfig, model_config: Any) -> None:
    """Refuse ``encode_rounds`` for a model whose items cannot be held back.

    Raises:
        ConfigError: `encode_rounds` is on, and this is an encoder-decoder model.
    """
    if config.encode_rounds and model_config.is_encoder_decoder:
        raise ConfigError(
            "option 'encode_rounds' cannot be on here, because this is an encoder-decoder model: its decoder starts "
            "with the encoder's output, which vLLM does not schedule apart from it. Leave 'encode_rounds' out"
        )


class RoundsPlanner:
    """Reads the scheduler, asks `EncodeRounds` about the items vLLM would encode, and ends chunks before held items.

    1. A waiting request that was held leaves its queue for the steps that would hold it again, so that the requests
       behind it are considered; vLLM before 0.32 would stop at it.
    2. The time of an encode is the time of its step minus the expected time of the step's tokens. A step begins when
       it is scheduled, or when the tokens of the previous one are out, whichever is later.
    3. At most `LOOK_AHEAD` waiting requests are considered in a step, with the items of their next chunk.
    """

    def __init__(
        self, scheduler: Any, config: OmniSchedConfig, book: SlaBook, steps: StepMeter, metrics: SchedulerMetrics
    ) -> None:
        self._scheduler, self._book, self._steps, self._metrics = scheduler, book, steps, metrics
        self._policy = EncodeRounds(config.max_wait_seconds, config.prefill_min_tokens)
        settings = scheduler.scheduler_config
        self._in_pieces = settings.enable_chunked_prefill and not settings.disable_chunked_mm_input
        self._step: RoundStep | None = None
        self._waits: set[str] = set()  # requests that were waiting when this step began
        self._stopped: dict[str, int] = {}  # held waiting requests -> tokens that are computed or in the prefix cache
        self._broken: set[str] = set()  # decoding requests that had an inter-token gap above their target
        self._scheduled: deque[tuple[SchedulerOutput, float]] = deque()
        self._last = 0.0  # when the tokens of the last step were out

    # -- a step ------------------------------------------------------------

    @contextmanager
    def limits(self, now: float) -> Iterator[None]:
        """Set the limits of one step, and hold requests back, for the duration of the block."""
        scheduler, settings = self._scheduler, self._scheduler.scheduler_config
        threshold, most = settings.long_prefill_token_threshold, scheduler.max_num_scheduled_tokens
        waiting = list(islice(iter(scheduler.waiting), LOOK_AHEAD))
        decoding, running = self._look(waiting, most, now)
        aside: list[Request] = []
        try:
            step = self._step
            if step is not None:
                aside = [request for request in waiting if self._is_held(step, request)]
                for request in aside:
                    scheduler.waiting.remove_request(request)
                if step.prompt_tokens < most - decoding:
                    scheduler.max_num_scheduled_tokens = decoding + step.prompt_tokens
                pieces = running + step.joining
                if self._in_pieces and step.gathers and pieces > 1:
                    piece = max((most - decoding) // pieces, 1)
                    settings.long_prefill_token_threshold = min(threshold, piece) if threshold else piece
            yield
        finally:
            for request in reversed(aside):
                scheduler.waiting.prepend_request(request)
            scheduler.max_num_scheduled_tokens = most
            settings.long_prefill_token_threshold = threshold
            self._step = None

    def _is_held(self, step: RoundStep, request: Request) -> bool:
        """Return whether a waiting request would be held again before it has a token to compute."""
        start = self._stopped.get(request.request_id)
        if start is None:
            return False
        first = next(self._missing(request, start, LEAST_PIECE), None)
        if first is None or not step.holds(request.request_id, self._encode_seconds(request, first)):
            del self._stopped[request.request_id]
            return False
        self._metrics.encode_rounds[RoundReason.HELD.value] += 1
        return True

    def _encode_seconds(self, request: Request, item: int) -> float:
        modality, embeds = request.mm_features[item].modality, request.get_num_encoder_embeds(item)
        return self._book.costs.encode_seconds(modality, embeds)

    def _look(self, waiting: list[Request], most: int, now: float) -> tuple[int, int]:
        """Plan a step; return the tokens of decoding requests, and how many prompts are being computed."""
        unharmed = broken = decoding = 0
        least, prompts, works = float("inf"), [], []
        for request in self._scheduler.running:
            if request.num_computed_tokens < request.num_prompt_tokens:
                prompts.append(request)
                continue
            decoding += 1 + len(request.spec_token_ids)
            least = min(least, self._book.of(request.request_id).itl_seconds)
            if request.request_id in self._broken:
                broken += 1
            else:
                unharmed += 1
        self._waits = {request.request_id for request in waiting}
        budget = left = max(most - decoding, 0)
        room = self._scheduler.encoder_cache_manager.num_freeable_slots
        slots = getattr(self._scheduler, compat.admission_limit(self._scheduler)) - len(self._scheduler.running)
        for request in (*prompts, *waiting[: max(slots, 0)]):
            missing = list(self._missing(request, request.num_computed_tokens, most))
            room -= sum(request.get_num_encoder_embeds(i) for i in missing)
            if room >= 0 or not missing:  # otherwise vLLM holds the request back
                works.append(self._work(request, missing, request.request_id not in self._waits, left > 0))
            left -= request.num_tokens - request.num_computed_tokens
        self._step = None
        if works:
            base, each = self._steps.predict(0), self._steps.seconds_per_token
            snapshot = RoundSnapshot(unharmed, broken, least, tuple(works), budget, base, each)
            self._step = self._policy.step(snapshot, now)
        return decoding, len(prompts)

    def _work(self, request: Request, missing: list[int], runs: bool, reached: bool) -> PromptWork:
        left = max(request.num_tokens - request.num_computed_tokens, 0)
        return PromptWork(
            request.request_id,
            sum(self._encode_seconds(request, i) for i in missing),
            self._book.costs.prefill_seconds(left),
            self._book.deadline(request.request_id),
            runs,
            reached,
        )

    def _missing(self, request: Request, start: int, tokens: int) -> Iterator[int]:
        """Yield the items with tokens in this chunk that this engine would have to encode."""
        features = request.mm_features
        if not isinstance(features, FeatureList) or not features.ends_after(start):
            return
        cached = self._scheduler.encoder_cache_manager.cached
        connector = getattr(self._scheduler, "ec_connector", None)
        for i in features.spans.overlapping(start, start + tokens):
            mm_hash = features[i].identifier
            if mm_hash not in cached and not (connector is not None and connector.has_cache_item(mm_hash)):
                yield i

    def cut(self, request: Request, start: int, tokens: int, shift: int) -> int:
        """Return how many tokens of a chunk may be computed: those before the first held item."""
        step, features = self._step, request.mm_features
        if step is None or tokens <= 0 or start >= request.num_tokens:
            return tokens
        deadline, left = self._book.deadline(request.request_id), request.num_tokens - start
        seconds = self._book.costs.prefill_seconds(left)
        room = self._scheduler.encoder_cache_manager.num_freeable_slots
        asked: set[str] = set()
        for i in self._missing(request, start, tokens + shift):
            room -= request.get_num_encoder_embeds(i)
            if features[i].identifier in asked or room < 0:  # without room, vLLM holds the item back
                continue
            asked.add(features[i].identifier)
            reason = step.encode(request.request_id, self._encode_seconds(request, i), seconds, deadline)
            self._metrics.encode_rounds[reason.value] += 1
            if reason in HOLDS:
                # the tokens that a drafter reads ahead must not reach the item either
                piece = max(features.spans.starts[i] - start - shift, 0)
                if piece < LEAST_PIECE and request.request_id in self._waits:
                    self._stopped[request.request_id] = start
                    return 0
                return min(tokens, piece)
        # a session's answer continues, and of a prompt that must not be split no token can be left out
        if tokens < left or request.num_output_tokens or request.resumable or not self._in_pieces:
            return tokens
        if tokens == 1 and request.request_id in self._waits:  # a waiting request would be left without a token
            return tokens
        if not step.first_token_waits(seconds, deadline):
            return tokens
        self._metrics.encode_rounds[RoundReason.DRAINS.value] += 1
        return tokens - 1

    # -- what steps took ---------------------------------------------------

    def scheduled(self, output: SchedulerOutput, now: float) -> None:
        """Note that a step was scheduled at ``now``, in seconds."""
        self._scheduled.append((output, now))

    def stepped(self, output: SchedulerOutput, now: float) -> None:
        """Learn from a step whose tokens are out: late decodes, and the time of its encodes."""
        if not output.total_num_scheduled_tokens:
            return
        begun = self._last
        while self._scheduled:
            one, at = self._scheduled.popleft()
            if one is output:
                begun = max(begun, at)
                break
        gap, self._last = now - self._last, now
        for request in self._scheduler.running:
            # the first token of a request ends no gap
            if request.num_output_tokens > 1 and gap > self._book.of(request.request_id).itl_seconds:
                self._broken.add(request.request_id)
        if output.scheduled_encoder_inputs:
            self._learn(output, max(now - begun - self._steps.predict(prompt_tokens_of(output)), 0.0))

    def _learn(self, output: SchedulerOutput, seconds: float) -> None:
        """Learn the time of a step's encodes, divided among modalities in proportion to their embeddings."""
        embeds: dict[str, int] = {}
        for request_id, items in output.scheduled_encoder_inputs.items():
            request = self._scheduler.requests.get(request_id)
            if request is None:  # the request has ended: the size of its items is unknown
                return
            for i in items:
                modality = request.mm_features[i].modality
                embeds[modality] = embeds.get(modality, 0) + request.get_num_encoder_embeds(i)
        total = sum(embeds.values())
        for modality, number in embeds.items():
            if total:
                self._book.costs.encoded(modality, number, seconds * number / total)

    def ended(self, request: Request) -> None:
        """Drop the state of a request that has ended, and learn from its length unless it was aborted."""
        self._broken.discard(request.request_id)
        self._stopped.pop(request.request_id, None)
        counts = request.status is not RequestStatus.FINISHED_ABORTED
        self._policy.ended(request.request_id, request.num_output_tokens if counts else 0)

"""Control of a step's limits: number of requests, prompt tokens, and encoder inputs.

vLLM reads its limits in each step. They are set before ``super().schedule()``, never above what the engine was
profiled for, and restored after it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config import OmniSchedConfig
from vllm_omni_sched.items import FeatureList
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.step_times import CostModel
from vllm_omni_sched.resource.control import make_control
from vllm_omni_sched.resource.encoder_budget import EncoderBudget, ModalityDemand
from vllm_omni_sched.resource.fair import LOOK_AHEAD, longest_piece


class Steering:
    """Reads the scheduler's state, asks the policies, and sets the limits of a step.

    1. ``batch_control`` bounds the number of running requests, never below the current number: it preempts none.
    2. ``prefill_control`` bounds the prompt tokens of a step while requests decode.
    3. ``pieces`` bounds the tokens of one prompt while several prompts want more than the step has.
    4. ``encoder_split`` bounds the embeddings encoded in a step: while requests decode, and once encodes were timed,
       to those that fit into ``itl_target_ms``, at least one item. Modalities get equal parts of that budget.
    """

    def __init__(self, scheduler: Any, config: OmniSchedConfig, costs: CostModel, metrics: SchedulerMetrics) -> None:
        self._scheduler = scheduler
        self._costs = costs
        self._itl_target = config.itl_target_ms / 1e3
        self._metrics = metrics
        profiled = scheduler.max_num_scheduled_tokens
        self._admission = compat.admission_limit(scheduler)
        slots = getattr(scheduler, self._admission)
        self.batch = make_control(config.batch_control, config, config.batch_min, min(config.batch_max, slots))
        self.prefill = make_control(config.prefill_control, config, config.prefill_min_tokens, profiled)
        self._pieces = config.pieces
        embeds = scheduler.max_num_encoder_input_tokens
        self._split = EncoderBudget(embeds) if config.encoder_split and embeds > 0 else None
        self._parts: dict[str, int] = {}  # modality -> embeddings left in this step

    @property
    def active(self) -> bool:
        """Whether anything is steered."""
        return self._pieces or any(one is not None for one in (self.batch, self.prefill, self._split))

    @contextmanager
    def limits(self) -> Iterator[None]:
        """Set the limits of one step for the duration of the block."""
        scheduler, settings = self._scheduler, self._scheduler.scheduler_config
        before = scheduler.max_num_scheduled_tokens, getattr(scheduler, self._admission)
        encoder_budget = scheduler.max_num_encoder_input_tokens
        threshold = settings.long_prefill_token_threshold
        try:
            if self.batch is not None:
                setattr(scheduler, self._admission, min(before[1], max(self.batch.limit, len(scheduler.running))))
            decoding = self._decode_tokens()
            if self.prefill is not None and decoding:
                scheduler.max_num_scheduled_tokens = min(before[0], decoding + self.prefill.limit)
            if self._pieces:
                self._cut(scheduler.max_num_scheduled_tokens - decoding)
            if self._split is not None:
                self._share_encoder(self._split, decoding > 0)
            yield
        finally:
            scheduler.max_num_scheduled_tokens = before[0]
            scheduler.max_num_encoder_input_tokens = encoder_budget
            setattr(scheduler, self._admission, before[1])
            settings.long_prefill_token_threshold = threshold

    def _decode_tokens(self) -> int:
        """Return the tokens that decoding requests need in this step."""
        return sum(
            1 + len(request.spec_token_ids)
            for request in self._scheduler.running
            if request.num_computed_tokens >= request.num_prompt_tokens
        )

    def _waiting(self) -> Iterator[Any]:
        return islice(iter(self._scheduler.waiting), LOOK_AHEAD)

    def _cut(self, budget: int) -> None:
        wanted = [request.num_tokens - request.num_computed_tokens for request in self._scheduler.running]
        prefilling = [tokens for tokens in wanted if tokens > 1]
        prefilling += [max(1, r.num_tokens - r.num_computed_tokens) for r in self._waiting()]
        if len(prefilling) < 2 or sum(prefilling) <= budget:
            return
        largest = longest_piece(prefilling, max(budget, 1))
        settings = self._scheduler.scheduler_config
        limit = settings.long_prefill_token_threshold
        settings.long_prefill_token_threshold = min(limit, largest) if limit else largest

    # -- encoder budget ----------------------------------------------------

    def _share_encoder(self, split: EncoderBudget, decoding: bool) -> None:
        self._parts = {}
        found = self._waiting_items()
        demands = [ModalityDemand(m, sum(of), max(of), of[0], order) for m, (order, of) in found.items() if min(of) > 0]
        if not demands or max(d.largest_embeds for d in demands) > split.profiled_embeds:
            return  # vLLM refuses an item that is too large for any step
        plan = split.plan(self._wanted_embeds(demands) if decoding else split.profiled_embeds, demands)
        self._scheduler.max_num_encoder_input_tokens = plan.embeds
        self._metrics.encoder_budgets[plan.reason.value] += 1
        if len(demands) > 1:
            self._parts = {share.modality: share.embeds for share in plan.shares}
            for share in plan.shares:
                self._metrics.encoder_parts[share.reason.value] += 1

    def _waiting_items(self) -> dict[str, tuple[int, list[int]]]:
        """Return, by modality, its first request's position and the sizes of its items in the next chunks, in
        embeddings.
        """
        found: dict[str, tuple[int, list[int]]] = {}
        for order, request in enumerate((*self._scheduler.running, *self._waiting())):
            features, start = request.mm_features, request.num_computed_tokens
            if not isinstance(features, FeatureList) or not features.ends_after(start):
                continue
            for i in features.spans.overlapping(start, start + self._scheduler.max_num_scheduled_tokens):
                found.setdefault(features[i].modality, (order, []))[1].append(request.get_num_encoder_embeds(i))
        return found

    def _wanted_embeds(self, demands: list[ModalityDemand]) -> int:
        """Return the embeddings that can be encoded within the ITL target; the profiled budget before any encode was
        timed.
        """
        assert self._split is not None
        seconds = sum(self._costs.encode_seconds(d.modality, d.total_embeds) for d in demands)
        total = sum(d.total_embeds for d in demands)
        return int(total * self._itl_target / seconds) if seconds else self._split.profiled_embeds

    def encoder_budget(self, features: Any, num_computed_tokens: int, budget: int) -> int:
        """Return the part of ``budget`` that is left to the next item's modality, in embeddings."""
        if not self._parts or not isinstance(features, FeatureList):
            return budget
        following = features.spans.num_covered(num_computed_tokens)
        if following >= len(features):
            return budget
        return min(budget, self._parts.get(features[following].modality, budget))

    def encoded(self, request: Any, inputs: list[int]) -> None:
        """Take the items that this step encodes for a request off their modalities' parts."""
        for i in inputs if self._parts else ():
            modality = request.mm_features[i].modality
            if modality in self._parts:
                self._parts[modality] = max(0, self._parts[modality] - request.get_num_encoder_embeds(i))

    # -- what steps took ---------------------------------------------------

    def stepped(self, now: float, seconds: float, num_requests: int, prompt_tokens: int) -> None:
        """Learn from the time of a step, in seconds, with its number of requests and prompt tokens."""
        metrics = self._metrics
        if self.batch is not None:
            self.batch.observe(seconds, now, num_requests)
            metrics.batch_limit = self.batch.limit
            metrics.batch_updates[self.batch.reason.value] += 1
        if self.prefill is not None:
            self.prefill.observe(seconds, now, prompt_tokens)
            metrics.prefill_limit = self.prefill.limit
            metrics.prefill_updates[self.prefill.reason.value] += 1

"""Limit a step: its requests, its prompt tokens, the longest chunk, and the embeddings that it encodes."""

from collections.abc import Sequence
from itertools import chain

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.requests import EngineFacts, EngineView
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.monitor.step_times import CostModel
from vllm_omni_sched.resource.engine.control import make_control
from vllm_omni_sched.resource.engine.encoder_budget import (
    LOOK_AHEAD,
    EncoderBudget,
    EncoderBudgetPlan,
    ModalityDemand,
    longest_piece,
)


class StepLimits:
    """Asks the policies for the limits of a step; without its option each is None, and its limit is the engine's own.

    1. ``batch_control`` bounds the number of running requests, never below the present number: it preempts none.
    2. ``prefill_control`` bounds the prompt tokens of a step while requests decode.
    3. ``pieces`` bounds the tokens of one prompt while several prompts want more than the step has.
    4. ``encoder_split`` bounds the embeddings encoded in a step: while requests decode, and once encodes were timed,
       to those that fit into ``itl_target_ms``, at least one item. Modalities get max-min fair parts of that budget.

    ``encoder_embeds``: the engine's own limit of embeddings in a step. ``parts``: embeddings that are left to each
    modality in this step; empty without a split.
    """

    def __init__(
        self, config: OmniSchedConfig, facts: EngineFacts, costs: CostModel, metrics: SchedulerMetrics
    ) -> None:
        self._costs, self._metrics = costs, metrics
        self._itl_target = config.itl_target_ms / 1e3
        self.encoder_embeds = facts.encoder_budget_embeds
        slots, tokens = facts.max_num_seqs, facts.max_num_batched_tokens
        self.batch = make_control(config.batch_control, config, config.batch_min, min(config.batch_max, slots))
        self.prefill = make_control(config.prefill_control, config, config.prefill_min_tokens, tokens)
        self._pieces = config.pieces
        splits = config.encoder_split and facts.encodes and facts.encoder_budget_embeds > 0
        self.split = EncoderBudget(facts.encoder_budget_embeds) if splits else None
        self.parts: dict[str, int] = {}

    @property
    def any(self) -> bool:
        """Return whether any limit is set."""
        return self._pieces or not (self.batch is None and self.prefill is None and self.split is None)

    def max_requests(self, most: int, running: int) -> int:
        """Return how many requests may run, of ``most`` that the engine allows."""
        return most if self.batch is None else min(most, max(self.batch.limit, running))

    def max_tokens(self, most: int, decode_tokens: int) -> int:
        """Return how many tokens a step may have, of ``most``."""
        if self.prefill is None or not decode_tokens:
            return most
        return min(most, decode_tokens + self.prefill.limit)

    def longest_chunk(self, view: EngineView, budget: int) -> int:
        """Return the most tokens of one prompt; ``budget`` if there is no such limit."""
        if not self._pieces:
            return budget
        wanted = [max(1, one.left) for one in chain(view.prompts(), view.waiting(LOOK_AHEAD))]
        if len(wanted) < 2 or sum(wanted) <= budget:
            return budget
        return longest_piece(wanted, max(budget, 1))

    # -- encoder budget ------------------------------------------------------

    def encoder_plan(self, view: EngineView, tokens: int) -> EncoderBudgetPlan | None:
        """Return the encoder budget of a step whose chunks have at most so many tokens; None for the engine's own."""
        split = self.split
        if split is None:
            return None
        self.parts = {}
        demands = self._demands(view, tokens)
        if not demands or max(one.largest_embeds for one in demands) > split.profiled_embeds:
            return None  # vLLM refuses an item that is too large for any step
        plan = split.plan(self._wanted(demands) if view.decode_tokens else split.profiled_embeds, demands)
        self._metrics.encoder_budgets[plan.reason.value] += 1
        if len(demands) > 1:
            self.parts = {share.modality: share.embeds for share in plan.shares}
            for share in plan.shares:
                self._metrics.encoder_parts[share.reason.value] += 1
        return plan

    @staticmethod
    def _demands(view: EngineView, tokens: int) -> list[ModalityDemand]:
        found: dict[str, tuple[int, list[int]]] = {}  # modality -> position of its first request, sizes of its items
        for order, one in enumerate(chain(view.prompts(), view.waiting(LOOK_AHEAD))):
            for item in one.items_within(one.computed, tokens):
                if item.embeds:
                    found.setdefault(item.modality, (order, []))[1].append(item.embeds)
        return [ModalityDemand(m, sum(of), max(of), of[0], order) for m, (order, of) in found.items()]

    def _wanted(self, demands: Sequence[ModalityDemand]) -> int:
        """Return the embeddings that can be encoded within the ITL target; all before any encode was timed."""
        assert self.split is not None
        seconds = sum(self._costs.encode_seconds(one.modality, one.total_embeds) for one in demands)
        total = sum(one.total_embeds for one in demands)
        return int(total * self._itl_target / seconds) if seconds else self.split.profiled_embeds

    def encodes(self, modality: str, embeds: int) -> None:
        """Take an item that this step encodes off its modality's part."""
        if modality in self.parts:
            self.parts[modality] = max(0, self.parts[modality] - embeds)

    # -- step times ----------------------------------------------------------

    def step_ended(self, now: float, seconds: float, num_requests: int, prompt_tokens: int) -> None:
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

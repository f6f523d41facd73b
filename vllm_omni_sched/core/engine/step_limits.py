"""Limit a step: its requests, its prompt tokens, and the longest chunk."""

from itertools import chain

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.requests import EngineFacts, EngineView
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.resource.engine.control import make_control
from vllm_omni_sched.resource.engine.pieces import LOOK_AHEAD, longest_piece


class StepLimits:
    """Asks the policies for the limits of a step; without its option each is None, and its limit is the engine's own.

    1. ``batch_control`` bounds the number of running requests, never below the present number: it preempts none.
    2. ``prefill_control`` bounds the prompt tokens of a step while requests decode.
    3. ``pieces`` bounds the tokens of one prompt while several prompts want more than the step has.

    ``encoder_embeds``: the engine's own limit of embeddings in a step.
    """

    def __init__(self, config: OmniSchedConfig, facts: EngineFacts, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics
        self.encoder_embeds = facts.encoder_budget_embeds
        slots, tokens = facts.max_num_seqs, facts.max_num_batched_tokens
        self.batch = make_control(config.batch_control, config, config.batch_min, min(config.batch_max, slots))
        self.prefill = make_control(config.prefill_control, config, config.prefill_min_tokens, tokens)
        self._pieces = config.pieces

    @property
    def any(self) -> bool:
        """Return whether any limit is set."""
        return self._pieces or self.batch is not None or self.prefill is not None

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

"""Model the scheduler's half of encoding in rounds: the input and the effect of `EncodeRounds`."""

from collections.abc import Sequence as Many

from vllm_omni_sched.resource.encode_rounds import (
    HOLDS,
    EncodeRounds,
    PromptWork,
    RoundReason,
    RoundSnapshot,
    RoundStep,
)
from vllm_omni_sched.sim.engine.decoding import Decodes
from vllm_omni_sched.sim.engine.encoding import Encoding
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.policies import EnginePolicies
from vllm_omni_sched.sim.engine.sequence import Sequence
from vllm_omni_sched.sim.work import Item


class Rounds:
    """Asks `EncodeRounds` which items this step encodes, as the real scheduler does.

    ``reasons``: counts of reasons.
    """

    def __init__(self, limits: EngineLimits, policies: EnginePolicies, decodes: Decodes, encoding: Encoding) -> None:
        assert policies.rounds is not None
        self._limits, self._policies, self._decodes, self._encoding = limits, policies, decodes, encoding
        self._policy: EncodeRounds = policies.rounds
        self._step: RoundStep | None = None
        self._stopped: set[str] = set()  # names of sequences with an item that this step holds
        self._running = 0
        self._room = 0  # embeddings that fit into the encoder cache
        self.reasons: dict[RoundReason, int] = {}

    def begin(self, running: Many[Sequence], waiting: Many[Sequence], budget: int, now: float) -> int:
        """Begin to plan a step, and return the prompt tokens that it may have, of ``budget``."""
        self._stopped.clear()
        self._step = None
        self._running = len(running)
        held = {
            item.content: item.embeds for one in running if one.held for item in one.items if item.content in one.held
        }
        room = self._room = self._limits.encoder_cache_embeds - sum(held.values())
        prompts, left = [], budget
        for i, one in enumerate((*running, *waiting)):
            missing = [
                item
                for item in (one.items[j] for j in one.window(self._limits.max_num_batched_tokens))
                if self._missing(one, item)
            ]
            room -= sum(item.embeds for item in missing)
            if room >= 0 or not missing:  # otherwise vLLM holds it back
                prompts.append(self._work(one, missing, i < len(running), left > 0))
            left -= one.prompt - one.computed
        if not prompts:
            return budget
        unharmed = broken = 0
        for sequence in self._decodes.sequences.values():
            gap = max(sequence.largest_gap, self._decodes.largest_since(sequence.first_step))
            if gap > sequence.sla.itl_seconds:
                broken += 1
            else:
                unharmed += 1
        steps = self._policies.steps
        least = min(self._decodes.targets.counts, default=float("inf"))
        base, each = steps.predict(0), steps.seconds_per_token
        step = self._step = self._policy.step(
            RoundSnapshot(unharmed, broken, least, tuple(prompts), max(budget, 0), base, each), now
        )
        return step.prompt_tokens if budget > 0 else budget

    def longest(self, budget: int) -> int:
        """Return the most tokens of one prompt, so that all requests with items in this step reach them."""
        step = self._step
        if step is None or not step.gathers:
            return budget
        return max(budget // max(self._running + step.joining, 1), 1)

    def _work(self, sequence: Sequence, missing: list[Item], runs: bool, reached: bool) -> PromptWork:
        costs = self._policies.costs
        encode = sum(costs.encode_seconds(item.modality, item.embeds) for item in missing)
        return PromptWork(
            sequence.name,
            encode,
            costs.prefill_seconds(sequence.prompt - sequence.computed),
            sequence.job.request.arrival + sequence.sla.ttft_seconds,
            runs,
            reached,
        )

    def _missing(self, sequence: Sequence, item: Item) -> bool:
        return item.content not in sequence.held and not self._encoding.has(item)

    def encodes(self, sequence: Sequence, item: Item) -> bool:
        """Return whether rounds allow the tokens of an item to be computed in this step."""
        if self._step is None or not self._missing(sequence, item) or item.embeds > self._room:
            return True
        costs = self._policies.costs
        reason = self._step.encode(
            sequence.name,
            costs.encode_seconds(item.modality, item.embeds),
            costs.prefill_seconds(sequence.prompt - sequence.computed),
            sequence.job.request.arrival + sequence.sla.ttft_seconds,
        )
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        if reason in HOLDS:
            self._stopped.add(sequence.name)
            return False
        self._room -= item.embeds
        return True

    def cut(self, sequence: Sequence, tokens: int) -> int:
        """Return the prompt tokens of this step: one less if a request with items must wait with its first token."""
        left = sequence.prompt - sequence.computed
        if self._step is None or tokens < left or sequence.made or not sequence.items:
            return tokens
        deadline = sequence.job.request.arrival + sequence.sla.ttft_seconds
        if not self._step.first_token_waits(self._policies.costs.prefill_seconds(left), deadline):
            return tokens
        self.reasons[RoundReason.DRAINS] = self.reasons.get(RoundReason.DRAINS, 0) + 1
        self._stopped.add(sequence.name)
        return tokens - 1

    def stops(self, sequence: Sequence) -> bool:
        """Return whether rounds leave the sequence without tokens in this step."""
        return sequence.name in self._stopped

    def forget(self) -> None:
        """Forget all state of an engine that died."""
        self._step = None
        self._policy.forget()

    def ended(self, sequence: Sequence, *, counts: bool) -> None:
        """Record the end of a sequence; ``counts``: it was not withdrawn."""
        self._policy.ended(sequence.name, sequence.made if counts else 0)

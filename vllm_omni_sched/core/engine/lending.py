"""Lend KV blocks to encodes: the loan, and what may be encoded with it."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.encode_ahead import EncodeAhead
from vllm_omni_sched.core.engine.requests import EngineFacts, EngineView, LendingFacts, LendingView, Prompt, PromptItem
from vllm_omni_sched.monitor.step_times import CostModel, StepMeter
from vllm_omni_sched.resource.engine.encoder_budget import LOOK_AHEAD
from vllm_omni_sched.resource.engine.lending import EncodeDemand, LendingReason, LendingSnapshot, MemoryLending

_SAFETY = 2.0  # encodes may take so many times as long as forecast before running requests need what was lent
_LEAST_STEPS = 4  # a loan lasts for at least so many steps: planned, sent, computed, reported


def _fitting(needs: Sequence[int], left: int) -> int:
    """Return how many of these requests, from the first on, fit together into so many blocks."""
    number = 0
    for blocks in needs:
        left -= blocks
        if left < 0:
            break
        number += 1
    return number


class KvLending:
    """Asks `MemoryLending` before each step, and turns the loan into embeddings that may be encoded at a time.

    1. ``reserve_embeds`` fit into the memory that the engine has set aside; each block of the loan has room for the
       activations of more.
    2. Running requests are forecast to need the rest of their prompts, and room for all tokens that each step may make
       until all encodes have ended, also those under way: by the measured times of steps and encodes, with a margin.
       With speculation these are a token and the drafts behind it, whether they are accepted or not.
    3. In an engine whose lane encodes, the items that are queued for the lane are waiting encodes; in any other, the
       items of the next chunks of at most `LOOK_AHEAD` requests, in the order in which they run.
    4. A step that encodes uses the loan until its tokens are out.
    5. While blocks are lent, requests are admitted as long as they leave what running requests will need, and they
       themselves by rule 2; at most `LOOK_AHEAD` in a step.
    6. When the last request leaves the engine, everything returns at once.

    ``lent_blocks``: the present loan. ``admits``: new requests that may be admitted, None for any number.
    ``reasons``: counts of plans other than to lend nothing to nobody.

    Raises:
        ConfigError: the largest item that the engine accepts would never fit.
    """

    def __init__(
        self,
        config: OmniSchedConfig,
        facts: EngineFacts,
        lending: LendingFacts,
        ahead: EncodeAhead | None,
        costs: CostModel,
        steps: StepMeter,
    ) -> None:
        self._facts, self._ahead = lending, ahead
        self._costs, self._steps = costs, steps
        self._chunk = facts.max_num_batched_tokens
        self.policy = MemoryLending(config.kv_lending)
        self.lent_blocks = 0
        self.admits: int | None = None
        self.reasons = dict.fromkeys(LendingReason, 0)
        self._in_steps: deque[int] = deque()  # embeddings of the steps under way that encode
        self._largest_batch = facts.encoder_budget_embeds
        largest = min(facts.encoder_budget_embeds, facts.encoder_cache_embeds)
        bound = self.policy.bound(lending.total_blocks)
        if self._blocks(largest) > bound:
            raise ConfigError(
                f"option 'kv_lending' lends at most {bound} of {lending.total_blocks} KV blocks, but the largest item "
                f"of {largest} embeddings needs {self._blocks(largest)} beside the {lending.reserve_embeds} embeddings "
                "that are set aside: raise it, set aside more, or lower the encoder's budget"
            )
        if ahead is not None:
            ahead.step_embeds = lending.reserve_embeds
            ahead.ledger.max_active_embeds = lending.reserve_embeds

    @property
    def most_blocks(self) -> int:
        """Return the most blocks that are ever lent."""
        return self.policy.bound(self._facts.total_blocks)

    @property
    def limit_embeds(self) -> int:
        """Return the embeddings that may be encoded at a time."""
        return self._facts.reserve_embeds + int(self.lent_blocks * self._facts.embeds_per_block)

    def left_for_step(self) -> int:
        """Return the embeddings that the next step may encode, beside those of the lane."""
        return max(0, self.limit_embeds - self._lane_embeds)

    @property
    def _lane_embeds(self) -> int:
        return self._ahead.ledger.active_embeds() if self._ahead is not None else 0

    def _blocks(self, embeds: int) -> int:
        """Return the loan with which so many embeddings may be encoded at a time."""
        return math.ceil(max(0, embeds - self._facts.reserve_embeds) / self._facts.embeds_per_block)

    def step_began(self, embeds: int) -> None:
        """Record that a step begins which encodes so many embeddings, more than none."""
        self._in_steps.append(embeds)

    def step_out(self) -> None:
        """Record that the tokens of the oldest such step are out."""
        if self._in_steps:
            self._in_steps.popleft()

    def emptied(self) -> None:
        """Take everything back, as no request is left that an encode is for."""
        self.lent_blocks, self.admits = 0, None
        if self._ahead is not None:
            self._ahead.ledger.max_active_embeds = self.limit_embeds

    def forget(self) -> None:
        """Forget the steps under way and the loan, after the engine has lost them."""
        self._in_steps.clear()
        self.lent_blocks, self.admits = 0, None

    def plan(self, view: LendingView, now: float) -> int:
        """Plan the loan from now on, and return how many blocks it has; the driver reserves or frees the difference."""
        kv = view.kv_blocks()
        demands, seconds = self._lane_demands() if self._ahead is not None else self._step_demands(view)
        used = self._blocks(max([self._lane_embeds, *self._in_steps]))
        growth = self._growth(seconds)
        needed = kv.prompt_blocks + kv.decodes * growth
        waiting = [blocks + growth for blocks in kv.waiting]
        blocked = kv.blocked
        if self.lent_blocks and waiting and waiting[0] > kv.free_blocks - needed:
            blocked = True
        snapshot = LendingSnapshot(
            self._facts.total_blocks,
            kv.free_blocks,
            self.lent_blocks,
            min(used, self.lent_blocks),
            needed,
            demands,
            blocked,
        )
        plan = self.policy.plan(snapshot, now)
        if plan.reason is not LendingReason.NOT_NEEDED:
            self.reasons[plan.reason] += 1
        left = kv.free_blocks + self.lent_blocks - plan.blocks - needed
        self.lent_blocks = plan.blocks
        self.admits = 0 if not plan.admits else _fitting(waiting, left) if plan.blocks else None
        if self._ahead is not None:
            self._ahead.ledger.max_active_embeds = self.limit_embeds
        return plan.blocks

    def _growth(self, seconds: float) -> int:
        """Return the blocks that a decoding request needs until encodes of so many seconds have ended."""
        step = self._steps.predict(0)
        steps = max(_LEAST_STEPS, _SAFETY * seconds / step if step else 0.0)
        tokens = steps * self._facts.step_tokens + self._facts.step_tokens - 1  # the last step looks ahead, too
        return math.ceil(tokens / self._facts.block_tokens)

    def _lane_demands(self) -> tuple[tuple[EncodeDemand, ...], float]:
        assert self._ahead is not None
        ledger, found = self._ahead.ledger, []
        sizes: list[int] = []
        # of those under way it is not known how much is left
        seconds = sum(map(self._ahead.encode_seconds, ledger.encoding()))
        for content, size in islice(ledger.queued(), LOOK_AHEAD):
            sizes.append(size)
            seconds += self._ahead.encode_seconds(content)
            found.append(EncodeDemand(self._blocks(ledger.active_embeds(*sizes))))
        return tuple(found), seconds

    def _missing(self, prompt: Prompt, view: EngineView) -> Iterator[PromptItem]:
        items = prompt.items_within(prompt.computed, self._chunk)
        return (item for item in items if item.embeds and not view.has_encoding(item.content))

    def _step_demands(self, view: EngineView) -> tuple[tuple[EncodeDemand, ...], float]:
        found: list[EncodeDemand] = []
        embeds, seconds, tokens = 0, 0.0, 0
        asked: set[str] = set()
        for one in chain(view.prompts(), view.waiting(LOOK_AHEAD)):
            if not one.runs:
                tokens += max(one.left, 0)
            for item in self._missing(one, view):
                if item.content in asked:
                    continue
                asked.add(item.content)
                embeds += item.embeds
                if embeds > self._largest_batch and found:
                    return tuple(found), seconds
                seconds += self._costs.encode_seconds(item.modality, item.embeds)
                found.append(EncodeDemand(self._blocks(embeds), -(-tokens // self._facts.block_tokens)))
        return tuple(found), seconds

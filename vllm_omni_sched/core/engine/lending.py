"""Lend KV blocks to encodes: the loan, and what may be encoded with it."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.encode_ahead import EncodeAhead
from vllm_omni_sched.core.engine.requests import EngineFacts, EngineView, LendingFacts, LendingView, Prompt, PromptItem
from vllm_omni_sched.monitor.step_times import CostModel, StepMeter
from vllm_omni_sched.resource.engine.lending import (
    EncodeDemand,
    LendingPlan,
    LendingReason,
    LendingSnapshot,
    MemoryLending,
)
from vllm_omni_sched.resource.engine.pieces import LOOK_AHEAD

_SAFETY = 2.0  # encodes may take so many times as long as forecast before running requests need what was lent
_LEAST_STEPS = 4  # a loan lasts for at least so many steps: planned, sent, computed, reported


class _LaneWaiters(NamedTuple):
    """The running requests that wait for the lane.

    ``requests``: their number. ``stalled``: the number of those that can compute nothing before an encode has ended.
    ``later_blocks``: what their prompts need behind the tokens that they may compute before that. ``prompt_blocks``: of
    the whole prompts of all running requests with items, as each of these may wait for the lane later.
    """

    requests: int = 0
    stalled: int = 0
    later_blocks: int = 0
    prompt_blocks: int = 0


class KvLending:
    """Asks `MemoryLending` before each step, and turns the loan into embeddings that may be encoded at a time.

    1. ``reserve_embeds`` fit into the memory that the engine has set aside; each block of the loan has room for the
       activations of more.
    2. Running requests are forecast to need the rest of their prompts, and room for all tokens that each step may make
       until all encodes have ended, also those under way: by the measured times of steps and encodes, with a margin.
       With speculation these are a token and the drafts behind it, whether they are accepted or not.
    3. In an engine whose lane encodes, the items that are queued for the lane are waiting encodes; in any other, the
       items of the next chunks of at most `LOOK_AHEAD` requests, in the order in which they run.
    4. A step that encodes uses the loan until its tokens are out, beside the lane. What the lane is about to begin is
       left out of what steps may encode.
    5. While blocks are lent, each request that the engine is about to admit must fit with the rest of its prompt and
       what it needs itself by rule 2, beside what running requests will need and those that were admitted in this step.
       The first one that does not fit ends the admission, as one without room does in vLLM.
    6. No encode begins in the lane before a plan has seen it: room is kept for those alone that the last plan has seen.
    7. No requests hold memory while all of them wait for a loan that it leaves no room for. What requests that wait for
       the lane need afterwards may be lent to the first encode, alone and while no other is under way. Requests whose
       items may not all be in their first chunk are admitted only as far as the largest loan has room beside their
       whole prompts, or one at a time; and no piece of a prompt runs before an item that does not fit into what is set
       aside. While all running requests wait for encodes, these go before requests that wait for blocks. So does the
       encode of the first waiting request in an engine without a lane where nothing runs, beside which rule 2 asks for
       no room.
    8. When the last request leaves the engine, everything returns at once.
    9. Streaming sessions are refused: they keep their blocks while they wait for input, for as long as a client likes,
       and no lane encodes their items.

    ``lent_blocks``: the present loan. ``admits``: whether the next step may admit new requests. ``room``: blocks that
    they may take from the last plan on, None while nothing is lent. ``reasons``: counts of plans other than to lend
    nothing to nobody.

    Raises:
        ConfigError: the largest item that the engine accepts would never fit, or the longest request beside it.
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
        self.admits = True
        self.room: int | None = None
        self._growth_blocks = 0  # by the last plan: what each admitted request needs beside the blocks of its prompt
        self.reasons = dict.fromkeys(LendingReason, 0)
        self._refused = False  # whether a request was refused since the last plan
        self._lane_queue: list[tuple[str, int]] = []  # contents, and the embeddings at a time once each has begun
        self._waiter_blocks = 0  # of the whole prompts of running requests that may wait for the lane
        self._embeds_in_steps: deque[int] = deque()  # of each step under way that encodes
        self._step_embeds = lending.reserve_embeds  # that the next step may encode
        self._largest_batch = facts.encoder_budget_embeds
        largest = min(facts.encoder_budget_embeds, facts.encoder_cache_embeds)
        bound = self.policy.bound(lending.total_blocks)
        if self._blocks(largest) > bound:
            raise ConfigError(
                f"option 'kv_lending' lends at most {bound} of {lending.total_blocks} KV blocks, but the largest item "
                f"of {largest} embeddings needs {self._blocks(largest)} beside the {lending.reserve_embeds} embeddings "
                "that are set aside: raise it, set aside more, or lower the encoder's budget"
            )
        if lending.request_blocks > self._never_lent:
            raise ConfigError(
                f"option 'kv_lending' lends up to {bound} of {lending.total_blocks} KV blocks, and the longest request "
                f"needs {lending.request_blocks}: lower 'kv_lending' or --max-model-len, or make the KV cache larger"
            )
        if ahead is not None:
            ahead.step_embeds = ahead.piece_embeds = lending.reserve_embeds
            ahead.ledger.submit_only = ()

    @property
    def _never_lent(self) -> int:
        return self._facts.total_blocks - self.most_blocks

    @property
    def most_blocks(self) -> int:
        """Return the most blocks that are ever lent."""
        return self.policy.bound(self._facts.total_blocks)

    def _lent_embeds(self, blocks: int) -> int:
        """Return the embeddings that may be encoded at a time with a loan of so many blocks."""
        return self._facts.reserve_embeds + int(blocks * self._facts.embeds_per_block)

    def left_for_step(self) -> int:
        """Return the embeddings that the next step may encode, beside those of the lane."""
        return self._step_embeds

    @property
    def _lane_embeds(self) -> int:
        return self._ahead.ledger.active_embeds() if self._ahead is not None else 0

    def _blocks(self, embeds: int) -> int:
        """Return the loan with which so many embeddings may be encoded at a time."""
        return math.ceil(max(0, embeds - self._facts.reserve_embeds) / self._facts.embeds_per_block)

    def step_began(self, embeds: int) -> None:
        """Record that a step begins which encodes so many embeddings, more than none."""
        self._embeds_in_steps.append(embeds)
        if embeds > self._facts.reserve_embeds:
            self.policy.began()

    def step_out(self) -> None:
        """Record that the tokens of the oldest such step are out."""
        if self._embeds_in_steps:
            self._embeds_in_steps.popleft()

    def emptied(self) -> None:
        """Take everything back, as no request is left that an encode is for."""
        self.lent_blocks = 0
        self.policy.forget()
        self._admit_all()
        if self._ahead is not None:
            self._ahead.ledger.submit_only = ()

    def forget(self) -> None:
        """Forget the steps under way and the loan, after the engine has lost them."""
        self._embeds_in_steps.clear()
        self.emptied()

    # -- admission -----------------------------------------------------------

    def _admit_all(self) -> None:
        """Let the engine admit as many requests as it likes, as nothing is lent."""
        self.admits, self.room, self._refused = True, None, False

    def may_admit(self, prompt: Prompt, blocks: int) -> bool:
        """Return whether a waiting request that needs so many blocks for its prompt may be admitted now.

        The engine asks about none while ``admits`` is false, as `EngineCore.begin_step` leaves no place for one.
        """
        others = self._waiter_blocks
        if others and others + blocks > self._never_lent and self._may_wait_for_lane(prompt):
            return False
        if self.room is None:
            return True
        fits = blocks + self._growth_blocks <= self.room
        self._refused = self._refused or not fits
        return fits

    def admitted(self, prompt: Prompt, blocks: int) -> None:
        """Record that a request was admitted that needs so many blocks for its prompt."""
        if self._may_wait_for_lane(prompt):
            self._waiter_blocks += blocks
        if self.room is not None:
            self.room -= blocks + self._growth_blocks

    def _may_wait_for_lane(self, prompt: Prompt) -> bool:
        """Return whether a request may wait for the lane once it runs: its items may not all be in its first chunk."""
        return self._ahead is not None and prompt.has_items and prompt.left > self._chunk

    # -- the loan ------------------------------------------------------------

    def plan(self, view: LendingView, now: float) -> int:
        """Plan the loan from now on, and return how many blocks it has; the driver reserves or frees the difference."""
        kv = view.kv_blocks()
        lane, step = self._lane_embeds, max(self._embeds_in_steps, default=0)
        if self._ahead is None:
            demands, seconds = self._step_demands(view)
        else:
            demands, seconds = self._lane_demands(self._ahead)
        used = self._blocks(lane + step)
        growth = self._growth(seconds)
        if self._ahead is None and not kv.running:
            growth = 0  # nothing decodes before the step that encodes, and the next one has a plan of its own
        needed = kv.prompt_blocks + kv.running * growth
        waiters = self._lane_waiters(view)
        self._waiter_blocks = waiters.prompt_blocks
        if self._ahead is not None and demands and not lane:
            spared = waiters.later_blocks + waiters.requests * growth
            demands = (demands[0]._replace(request_blocks=-spared), *demands[1:])
        blocked = kv.blocked or self._refused
        if self.lent_blocks and kv.first is not None:
            blocked = blocked or kv.first_blocks + growth > kv.free_blocks - needed
        if kv.running and waiters.stalled == kv.running:
            blocked = False  # nothing ends before an encode has
        elif not kv.running and self._waits_for_loan(kv.first, demands, view):
            blocked = False  # only a loan may have kept it out
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
        self._admit_all()
        if plan.blocks or not plan.admits:
            self.admits, self.room, self._growth_blocks = plan.admits, left, growth
        if self._ahead is None:
            self._step_embeds = self._lent_embeds(plan.blocks if plan.begins or not demands else 0)
        else:
            self._divide(self._ahead, plan, lane, step)
        return plan.blocks

    def _divide(self, ahead: EncodeAhead, plan: LendingPlan, lane: int, step: int) -> None:
        """Divide the memory between the lane and the next step.

        ``lane``: embeddings that the lane encodes at a time now. ``step``: those of the largest step under way.
        """
        ledger, begins = ahead.ledger, plan.begins
        most = self._lent_embeds(plan.blocks)
        ledger.submit_only = [content for content, _ in self._lane_queue[:begins]]
        ledger.max_active_embeds = most - step
        if begins:  # what the lane gets as soon as the steps under way have ended
            lane = max(lane, self._lane_queue[begins - 1][1])
        ahead.step_embeds = self._step_embeds = max(0, min(most - lane, self._facts.reserve_embeds))

    def _growth(self, seconds: float) -> int:
        """Return the blocks that a decoding request needs until encodes of so many seconds have ended."""
        step = self._steps.predict(0)
        steps = max(_LEAST_STEPS, _SAFETY * seconds / step if step else 0.0)
        tokens = steps * self._facts.step_tokens + self._facts.step_tokens - 1  # the last step looks ahead, too
        return math.ceil(tokens / self._facts.block_tokens)

    def _lane_demands(self, ahead: EncodeAhead) -> tuple[tuple[EncodeDemand, ...], float]:
        ledger, found = ahead.ledger, []
        sizes: list[int] = []
        # of those under way it is not known how much is left
        seconds = sum(map(ahead.encode_seconds, ledger.encoding()))
        self._lane_queue = []
        for content, size in islice(ledger.queued(), LOOK_AHEAD):
            sizes.append(size)
            seconds += ahead.encode_seconds(content)
            together = ledger.active_embeds(*sizes)
            self._lane_queue.append((content, together))
            found.append(EncodeDemand(self._blocks(together)))
        return tuple(found), seconds

    def _lane_waiters(self, view: EngineView) -> _LaneWaiters:
        """Return how many running requests wait for the lane, and what their prompts need."""
        ahead, size = self._ahead, self._facts.block_tokens
        if ahead is None:
            return _LaneWaiters()
        requests = stalled = later_blocks = prompt_blocks = 0
        for one in view.prompts():
            if not one.has_items:
                continue
            blocks = -(-(one.computed + one.left) // size)
            prompt_blocks += blocks
            if (stop := ahead.stops_at(one, view)) is not None:
                requests += 1
                stalled += stop == one.computed
                later_blocks += blocks + -stop // size
        return _LaneWaiters(requests, stalled, later_blocks, prompt_blocks)

    def _waits_for_loan(self, first: Prompt | None, demands: Sequence[EncodeDemand], view: EngineView) -> bool:
        """Return whether a step must encode an item of the first waiting request, and needs a loan for it."""
        if self._ahead is not None or first is None or not demands or not demands[0].loan_blocks:
            return False
        return any(self._missing(first, view))

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

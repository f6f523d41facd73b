"""Whatever happens to requests and encodes, `EngineCore` lends within its bounds, and every KV block comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.core.engine.test_core import OnePrompt, View
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.ledger import EncodeState
from vllm_omni_sched.core.engine.requests import EngineFacts, KvBlocks, LendingFacts, PromptItem
from vllm_omni_sched.graph.order import INTERACTIVE

SETTINGS = settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow])
TOTAL, BLOCK, RESERVE, EMBEDS_PER_BLOCK, LARGEST = 40, 16, 16, 8.0, 160
MOST = 0.5
STEP_SECONDS = 0.05
PATIENCE_STEPS = 41  # 2 seconds
EMBEDS_PER_STEP = 16  # that the lane encodes meanwhile, as it was measured; one item after the other


@dataclass
class Req(OnePrompt):
    """A request whose prompt is computed in one step, and which then makes a token in each."""

    output: int = 1

    @property
    def blocks(self) -> int:
        return -(-(self.left + self.computed + self.made) // BLOCK)


class AtLane(NamedTuple):
    """An item that the lane has; it encodes the first one of them."""

    content: str
    ticket: int
    embeds: int


@dataclass
class Engine(View):
    """Carries out what the core decides, as vLLM's scheduler and the lane would.

    ``keeps_time``: encodes take as long as they were measured to take; else they end by the events alone.
    """

    keeps_time: bool = False
    active: list[Req] = field(default_factory=list)
    waits: list[Req] = field(default_factory=list)
    lane: list[AtLane] = field(default_factory=list)
    worked: int = 0  # steps of the lane at its first item
    steps: int = 0
    lent: int = 0
    ended: int = 0
    stuck: int = 0  # steps for which the first request has not started that would fit without the loan

    def __post_init__(self) -> None:
        config = OmniSchedConfig(encode_ahead=True, kv_lending=MOST, itl_target_ms=0.01)
        lending = LendingFacts(TOTAL, BLOCK, RESERVE, EMBEDS_PER_BLOCK)
        self.core = EngineCore(config, EngineFacts(16, 256, LARGEST, LARGEST, lending=lending))
        assert self.core.ahead is not None
        assert self.core.lending is not None
        self.ahead, self.lending = self.core.ahead, self.core.lending
        for step in range(-9, 1):  # what a step takes is known
            self.core.step_ended(self, step * STEP_SECONDS, num_running=1, num_requests=1, prompt_tokens=0)
        self.core.costs.encoded("image", LARGEST, LARGEST / EMBEDS_PER_STEP * STEP_SECONDS)

    # -- as the core sees it ---------------------------------------------------

    @property
    def now(self) -> float:
        return self.steps * STEP_SECONDS

    @property
    def num_running(self) -> int:
        return len(self.active)

    @property
    def num_requests(self) -> int:
        return len(self.active) + len(self.waits)

    def waiting(self, count: int) -> list[OnePrompt]:
        return list(self.waits[:count])

    @property
    def free(self) -> int:
        return TOTAL - self.lent - sum(one.blocks for one in self.active)

    def _ready_to_start(self) -> list[Req]:
        return [one for one in self.waits if not self.ahead.ledger.waits(one.request_id)]

    def kv_blocks(self) -> KvBlocks:
        needs = [one.blocks for one in self._ready_to_start()]
        return KvBlocks(self.free, 0, len(self.active), bool(needs) and needs[0] > self.free, needs)

    # -- what happens ------------------------------------------------------------

    def arrive(self, tokens: int, output: int, embeds: int) -> None:
        name = f"request {self.steps} {self.num_requests} {self.ended}"
        items = [PromptItem(f"item {name}", "image", embeds, 1)] if embeds else []
        self.core.enter(name, INTERACTIVE, self.now)
        self.waits.append(Req(name, items, tokens, output=output))

    def leave(self, one: Req) -> None:
        (self.active if one in self.active else self.waits).remove(one)
        self.ended += 1
        self.core.leave(one.request_id, one.made, self.now)
        if not self.num_requests:
            assert self.lending.lent_blocks == 0, "the last request has left, and a loan stays"
            self.lent = 0

    def abort(self, at: int) -> None:
        if everyone := [*self.active, *self.waits]:
            self.leave(everyone[at % len(everyone)])

    def encoded(self, *, fails: bool = False) -> None:
        if not self.lane:
            return
        one, self.worked = self.lane.pop(0), 0
        if not fails:
            self.ahead.encoded(one.content, one.ticket, one.embeds / EMBEDS_PER_STEP * STEP_SECONDS, self.now)
            return
        self.ahead.failed(one.content, one.ticket, self.now)
        for name in self.ahead.take_failed():
            self.leave(next(each for each in (*self.active, *self.waits) if each.request_id == name))

    def step(self) -> None:
        self.steps += 1
        self._lend()
        most = self.core.begin_step(self, 16, 256, self.now).max_requests
        for one in list(self.active):
            if one in self.active:
                self._decode(one)
        in_step = self._admit(most)
        self._send()
        if self.lane:
            self.worked += 1
            if self.keeps_time and self.worked * EMBEDS_PER_STEP >= self.lane[0].embeds:
                self.encoded()
        self.core.step_ended(
            self,
            self.now,
            num_running=len(self.active),
            num_requests=len(self.active),
            prompt_tokens=0,
            rest_seconds=0.0,
            encodes={"image": (in_step, 0.01)} if in_step else None,
        )
        for one in [one for one in self.active if one.made >= one.output]:
            self.leave(one)
        self.core.validate()
        assert self.free >= 0

    def _lend(self) -> None:
        before, free = self.lent, self.free
        blocked = self.kv_blocks().blocked
        self.lent = self.lending.plan(self, self.now)
        used = self._used()
        assert self.lent - before <= free, "more was lent than is free"
        assert self.lent <= max(before, self.lending.most_blocks)
        assert self.lent <= TOTAL * MOST
        assert self.lent >= min(used, before), "memory was taken back that an encode uses"
        if before > used and blocked and not self.ahead.ledger.num_pending:
            assert self.lent <= used, "a request waits for blocks that lie idle"

    def _used(self) -> int:
        embeds = max([one.embeds for one in self.lane], default=0)
        return max(0, -(-(embeds - RESERVE) // int(EMBEDS_PER_BLOCK)))

    def _decode(self, one: Req) -> None:
        more = one.blocks
        one.made += 1
        if one.blocks == more or self.free >= 0:
            return
        by_the_loan = self.free + self.lent >= 0
        assert not (by_the_loan and self.keeps_time), "a loan has preempted a request"
        assert not (by_the_loan and self.lent > self._used()), "a request was preempted, and blocks lay idle"
        while self.free < 0:
            last = self.active.pop()
            last.left, last.computed = last.left + last.computed, 0
            self.waits.insert(0, last)

    def _admit(self, most: int) -> int:
        """Start waiting requests as vLLM does, in their order; return the embeddings that are encoded in the step."""
        in_step = 0
        first = next(iter(self._ready_to_start()), None)
        fits = first is not None and first.blocks <= self.free + self.lent - self._growth()
        for one in list(self.waits):
            if len(self.active) >= most or self.ahead.ledger.waits(one.request_id):
                continue
            if not self.ahead.next_chunk(one, 0, self, self.now).may_run:
                continue
            if one.blocks > self.free:
                break
            for item in one.items:
                if self.ahead.load(item.content, self.now) or item.content in self.cached:
                    self.cached.add(item.content)
                    continue
                assert item.embeds <= RESERVE, "a large item is encoded in the step"
                in_step += item.embeds
                self.cached.add(item.content)
                self.lending.step_began(item.embeds)
            self.waits.remove(one)
            one.computed, one.left = one.left, 0
            self.active.append(one)
        self.stuck = self.stuck + 1 if fits and first in self.waits else 0
        return in_step

    def _growth(self) -> int:
        return len(self.active)

    def _send(self) -> None:
        actions = self.ahead.take_actions()
        gone = set(actions.forget)
        if self.lane and self.lane[0].content in gone:
            self.worked = 0
        self.lane = [one for one in self.lane if one.content not in gone]
        for content, ticket, _, embeds in actions.submit:
            self.lane.append(AtLane(content, ticket, embeds))
        assert max([one.embeds for one in self.lane], default=0) <= RESERVE + self.lent * EMBEDS_PER_BLOCK, (
            "encoded without memory"
        )
        assert all(self.ahead.ledger.state(one.content) is EncodeState.ENCODING for one in self.lane)


TEXTS = st.tuples(st.just("arrive"), st.integers(1, 250), st.integers(1, 60), st.just(0))
ITEMS = st.tuples(st.just("arrive"), st.integers(1, 250), st.integers(1, 30), st.integers(1, LARGEST))
ABORT = st.tuples(st.just("abort"), st.integers(0, 9), st.just(0), st.just(0))
LANE = st.tuples(st.sampled_from(["encoded", "fails"]), st.just(0), st.just(0), st.just(0))
STEPS = st.tuples(st.just("steps"), st.integers(1, 30), st.just(0), st.just(0))


def do(engine: Engine, event: tuple[str, int, int, int]) -> None:
    what, first, *more = event
    if what == "arrive":
        engine.arrive(first, *more)
    elif what == "abort":
        engine.abort(first)
    elif what == "steps":
        for _ in range(first):
            engine.step()
    else:
        engine.encoded(fails=what == "fails")


def drained(engine: Engine) -> None:
    """Let all that is there run to its end, and check that everything is back."""
    steps, requests = 0, engine.num_requests
    engine.keeps_time, engine.worked = True, 0
    while engine.num_requests:
        engine.step()
        steps += 1
        assert steps < 200 * requests, "a request or an encode never ran"
    assert (engine.lent, engine.free) == (0, TOTAL)
    assert not len(engine.ahead.ledger)


@SETTINGS
@given(st.lists(st.one_of(TEXTS, ITEMS, ABORT, LANE, STEPS), max_size=60))
def test_loans_keep_their_bounds_and_everything_comes_back(events: list[tuple[str, int, int, int]]) -> None:
    """Encodes that last for ever, fail or are aborted may cost a preemption, but no block, and none that lies idle."""
    engine = Engine()
    for event in events:
        do(engine, event)
    drained(engine)


@SETTINGS
@given(st.lists(st.one_of(TEXTS, ITEMS, ABORT, STEPS), max_size=60))
def test_encodes_as_long_as_measured_preempt_nobody(events: list[tuple[str, int, int, int]]) -> None:
    engine = Engine(keeps_time=True)
    for event in events:
        do(engine, event)
    drained(engine)


@SETTINGS
@given(st.lists(st.one_of(TEXTS, ITEMS, STEPS), min_size=1, max_size=40))
def test_a_request_that_fits_without_the_loan_starts_within_bounded_steps(
    events: list[tuple[str, int, int, int]],
) -> None:
    """However many encodes ask for loans."""
    engine = Engine(keeps_time=True)
    longest = 60 + PATIENCE_STEPS + LARGEST // EMBEDS_PER_STEP  # what runs ends, then there is a turn, and an encode
    for event in events:
        do(engine, event)
        assert engine.stuck <= longest
    while engine.num_requests:
        engine.step()
        assert engine.stuck <= longest

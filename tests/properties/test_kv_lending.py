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
EMBEDS_PER_STEP = 16  # that the lane encodes meanwhile in each of its places, as it was measured


@dataclass
class Req(OnePrompt):
    """A request whose prompt is computed in chunks, and which then makes tokens in each step.

    ``blocks``: that it holds. ``grammar``: the step in which its grammar is there, which the engine sees when it looks
    at the request then; 0 without one.
    """

    output: int = 1
    blocks: int = 0
    grammar: int = 0

    @property
    def needs(self) -> int:
        """Return the blocks for the rest of its prompt."""
        return -(-(self.computed + self.left) // BLOCK) + -self.computed // BLOCK

    def more(self, tokens: int) -> int:
        """Return the blocks that are missing for so many more tokens."""
        return max(0, -(-(self.computed + tokens) // BLOCK) - self.blocks)


class AtLane(NamedTuple):
    """An item that the lane has."""

    content: str
    ticket: int
    embeds: int


@dataclass
class Engine(View):
    """Carries out what the core decides, as vLLM's scheduler and the lane would.

    ``keeps_time``: encodes take as long as they were measured to take; else they end by the events alone.
    ``overdue``: one may have taken longer. ``chunk``: tokens of a step. ``step_tokens``: of a decoding request in a
    step, with its drafts, which are all accepted. ``places``: items that the lane encodes at a time.
    """

    keeps_time: bool = False
    chunk: int = 256
    step_tokens: int = 1
    places: int = 1
    active: list[Req] = field(default_factory=list)
    waits: list[Req] = field(default_factory=list)
    lane: list[AtLane] = field(default_factory=list)
    worked: dict[str, int] = field(default_factory=dict)  # steps of the lane at each item
    steps: int = 0
    lent: int = 0
    ended: int = 0
    stuck: int = 0  # steps for which the first request has not started that would fit without the loan

    def __post_init__(self) -> None:
        config = OmniSchedConfig(encode_ahead=True, kv_lending=MOST, itl_target_ms=0.01)
        lending = LendingFacts(TOTAL, BLOCK, RESERVE, EMBEDS_PER_BLOCK, self.step_tokens)
        self.core = EngineCore(config, EngineFacts(16, self.chunk, LARGEST, LARGEST, lending=lending))
        assert self.core.ahead is not None
        assert self.core.lending is not None
        self.ahead, self.lending = self.core.ahead, self.core.lending
        self.ahead.lane_is(self.places, own_processors=False)
        self.overdue = not self.keeps_time
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

    @property
    def decode_tokens(self) -> int:
        return sum(self.step_tokens for one in self.active if one.made)

    def prompts(self) -> list[Req]:  # type: ignore[override]
        return [one for one in self.active if one.left > 1 or not one.made]

    def waiting(self, count: int) -> list[OnePrompt]:
        return list(self.waits[:count])

    @property
    def free(self) -> int:
        return TOTAL - self.lent - sum(one.blocks for one in self.active)

    def _ready_to_start(self) -> list[Req]:
        return [one for one in self.waits if not (one.grammar or self.ahead.ledger.waits(one.request_id))]

    def kv_blocks(self) -> KvBlocks:
        prompts = sum(one.needs for one in self.prompts())
        first = next(iter(self._ready_to_start()), None)
        if first is None:
            return KvBlocks(self.free, prompts, len(self.active))
        return KvBlocks(self.free, prompts, len(self.active), first, first.needs, first.needs > self.free - prompts)

    # -- what happens ------------------------------------------------------------

    def arrive(self, tokens: int, output: int, embeds: int, *, grammar: int = 0) -> None:
        name = f"request {self.steps} {self.num_requests} {self.ended}"
        items = [PromptItem(f"item {name}", "image", embeds, max(0, tokens - embeds))] if embeds else []
        self.core.enter(name, INTERACTIVE, self.now)
        wait = self.steps + grammar if grammar else 0
        self.waits.append(Req(name, items, max(tokens, embeds), output=output, grammar=wait))

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
        one = self.lane.pop(0)
        self.worked.pop(one.content, None)
        if not fails:
            self.ahead.encoded(one.content, one.ticket, one.embeds / EMBEDS_PER_STEP * STEP_SECONDS, self.now)
            return
        self.ahead.failed(one.content, one.ticket, self.now)
        for name in self.ahead.take_failed():
            self.leave(next(each for each in (*self.active, *self.waits) if each.request_id == name))

    def step(self) -> None:
        self.steps += 1
        self._lend()
        plan = self.core.begin_step(self, 16, self.chunk, self.now)
        self.budget, self.embeds = plan.max_tokens, plan.encoder_embeds or 0
        before, may_encode = len(self.active), self.embeds
        chunks = self._run()
        if len(self.active) == before:  # vLLM admits nobody in a step in which it preempts
            chunks += self._admit(plan.max_requests)
        in_step = may_encode - self.embeds
        if in_step:
            self.lending.step_began(in_step)
        self._send(in_step)
        for one, tokens in chunks:
            self._computed(one, tokens)
        self._work()
        self.core.step_ended(
            self,
            self.now,
            num_running=len(self.active),
            num_requests=len(self.active),
            prompt_tokens=0,
            rest_seconds=0.0,
            encodes={"image": (in_step, in_step / EMBEDS_PER_STEP * STEP_SECONDS)} if in_step else None,
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

    def _wanted(self) -> list[int]:
        """Return the sizes of what the lane has and is still wanted: what was aborted leaves it in this step."""
        state = self.ahead.ledger.state
        return [one.embeds for one in self.lane if state(one.content) is EncodeState.ENCODING]

    def _used(self) -> int:
        """Return the blocks that the lane needs now."""
        embeds = sum(self._wanted()[: self.places])
        return max(0, -(-(embeds - RESERVE) // int(EMBEDS_PER_BLOCK)))

    # -- a step ------------------------------------------------------------------

    def _chunk_of(self, one: Req) -> int:
        """Return the tokens of a request in this step, as far as its items are there, and encode or load these."""
        if one.made and one.left == 1:
            return min(self.step_tokens, self.budget)
        tokens = self.ahead.cut(one.request_id, one.computed, min(one.left, self.budget))
        for item in one.items_within(one.computed, tokens):
            if item.content in self.cached:
                continue
            if self.ahead.load(item.content, self.now):
                self.cached.add(item.content)
            elif not self.ahead.goes_ahead(one.request_id) and item.embeds <= self.embeds:
                self.embeds -= item.embeds
                self.cached.add(item.content)
            else:
                tokens = max(0, item.start - one.computed)
                break
        return tokens

    def _run(self) -> list[tuple[Req, int]]:
        """Give running requests their tokens and blocks, and preempt the last ones where there are too few."""
        chunks = []
        for one in list(self.active):
            if one not in self.active or not self.budget:
                continue
            prompt = one.left > 1 or not one.made
            if prompt and not self.ahead.next_chunk(one, one.computed, self, self.now).may_run:
                continue
            tokens = self._chunk_of(one)
            if not tokens:
                continue
            more = one.more(tokens + self.step_tokens - 1)
            while more > self.free and one in self.active:
                self._preempt(more)
            if one in self.active:
                one.blocks += more
                self.budget -= tokens
                chunks.append((one, tokens))
        return chunks

    def _preempt(self, more: int) -> None:
        by_the_loan = more <= self.free + self.lent
        assert not (by_the_loan and not self.overdue), "a loan has preempted a request"
        assert not (by_the_loan and self.lent > self._used()), "a request was preempted, and blocks lay idle"
        last = self.active.pop()
        last.left, last.computed, last.blocks = last.left + last.computed, 0, 0
        self.cached -= {item.content for item in last.items}
        self.waits.insert(0, last)

    def _admit(self, most: int) -> list[tuple[Req, int]]:
        """Start waiting requests as vLLM does, in their order."""
        chunks = []
        first = next(iter(self._ready_to_start()), None)
        fits = first is not None and first.needs <= self.free + self.lent - self._growth()
        for one in list(self.waits):
            if len(self.active) >= most or not self.budget:
                break
            assert self.lending.admits, "a step that may admit nobody has a place for a request"
            if one.grammar > self.steps or not self.ahead.next_chunk(one, 0, self, self.now).may_run:
                continue
            one.grammar = 0
            tokens = self._chunk_of(one)
            more = one.more(tokens + self.step_tokens - 1)
            if not tokens or one.needs > self.free or more > self.free or not self.lending.may_admit(one, one.needs):
                break
            self.lending.admitted(one, one.needs)
            self.waits.remove(one)
            one.blocks += more
            self.budget -= tokens
            self.active.append(one)
            chunks.append((one, tokens))
        self.stuck = self.stuck + 1 if fits and first in self.waits else 0
        return chunks

    def _growth(self) -> int:
        return sum(one.needs + 1 for one in self.active)

    def _computed(self, one: Req, tokens: int) -> None:
        if one not in self.active:
            return
        if one.made and one.left == 1:
            one.computed, one.made = one.computed + tokens, one.made + tokens
            return
        one.computed, one.left = one.computed + tokens, one.left - tokens
        if not one.left:
            one.made, one.left = one.made + 1, 1

    def _send(self, in_step: int) -> None:
        actions = self.ahead.take_actions()
        gone = set(actions.forget)
        self.lane = [one for one in self.lane if one.content not in gone]
        for content, ticket, _, embeds in actions.submit:
            self.lane.append(AtLane(content, ticket, embeds))
        at_work = sum(one.embeds for one in self.lane[: self.places])
        assert at_work + in_step <= RESERVE + self.lent * EMBEDS_PER_BLOCK, "encoded without memory"
        assert all(self.ahead.ledger.state(one.content) is EncodeState.ENCODING for one in self.lane)

    def _work(self) -> None:
        for one in self.lane[: self.places]:
            self.worked[one.content] = self.worked.get(one.content, 0) + 1
        if self.keeps_time:
            for one in [one for one in self.lane if self.worked.get(one.content, 0) * EMBEDS_PER_STEP >= one.embeds]:
                self.lane.remove(one)
                self.lane.insert(0, one)
                self.encoded()


ENGINES = st.fixed_dictionaries(
    {"chunk": st.sampled_from([32, 256]), "step_tokens": st.sampled_from([1, 3]), "places": st.sampled_from([1, 2])}
)
TEXTS = st.tuples(st.just("arrive"), st.integers(1, 250), st.integers(1, 60), st.just(0))
ITEMS = st.tuples(st.just("arrive"), st.integers(1, 250), st.integers(1, 30), st.integers(1, LARGEST))
OTHERS = st.tuples(st.just("grammar"), st.integers(1, 250), st.integers(1, 30), st.integers(0, 80))
ABORT = st.tuples(st.just("abort"), st.integers(0, 9), st.just(0), st.just(0))
LANE = st.tuples(st.sampled_from(["encoded", "fails"]), st.just(0), st.just(0), st.just(0))
STEPS = st.tuples(st.just("steps"), st.integers(1, 30), st.just(0), st.just(0))


def do(engine: Engine, event: tuple[str, int, int, int]) -> None:
    what, first, *more = event
    if what == "arrive":
        engine.arrive(first, *more)
    elif what == "grammar":
        engine.arrive(first, *more, grammar=1 + first % 4)
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
    engine.keeps_time, engine.worked = True, {}
    while engine.num_requests:
        engine.step()
        steps += 1
        assert steps < 200 * requests, "a request or an encode never ran"
    assert (engine.lent, engine.free) == (0, TOTAL)
    assert not len(engine.ahead.ledger)


@SETTINGS
@given(ENGINES, st.lists(st.one_of(TEXTS, ITEMS, OTHERS, ABORT, LANE, STEPS), max_size=60))
def test_loans_keep_their_bounds_and_everything_comes_back(
    sizes: dict[str, int], events: list[tuple[str, int, int, int]]
) -> None:
    """Encodes that last for ever, fail or are aborted may cost a preemption, but no block, and none that lies idle."""
    engine = Engine(**sizes)  # type: ignore[arg-type]
    for event in events:
        do(engine, event)
    drained(engine)


@SETTINGS
@given(ENGINES, st.lists(st.one_of(TEXTS, ITEMS, OTHERS, ABORT, STEPS), max_size=60))
def test_encodes_as_long_as_measured_preempt_nobody(
    sizes: dict[str, int], events: list[tuple[str, int, int, int]]
) -> None:
    """Nobody is preempted who would not have been without the loan."""
    engine = Engine(keeps_time=True, **sizes)  # type: ignore[arg-type]
    for event in events:
        do(engine, event)
    drained(engine)


@SETTINGS
@given(ENGINES, st.lists(st.one_of(TEXTS, ITEMS, OTHERS, STEPS), min_size=1, max_size=40))
def test_a_request_that_fits_without_the_loan_starts_within_bounded_steps(
    sizes: dict[str, int], events: list[tuple[str, int, int, int]]
) -> None:
    """However many encodes ask for loans."""
    engine = Engine(keeps_time=True, **sizes)  # type: ignore[arg-type]
    longest = 60 + PATIENCE_STEPS + LARGEST // EMBEDS_PER_STEP  # what runs ends, then there is a turn, and an encode
    for event in events:
        do(engine, event)
        assert engine.stuck <= longest
    while engine.num_requests:
        engine.step()
        assert engine.stuck <= longest

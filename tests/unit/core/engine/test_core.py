"""The core of an engine: what it decides for one request, its story, and its conservation laws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.requests import Decodes, EngineFacts, PromptItem
from vllm_omni_sched.graph.order import INTERACTIVE, PlaceReason, WaitingRequest

FACTS = EngineFacts(16, 256, 256, 256)


@dataclass
class OnePrompt:
    request_id: str
    items: list[PromptItem] = field(default_factory=list)
    left: int = 200
    computed: int = 0
    made: int = 0
    runs: bool = False
    is_session: bool = False

    @property
    def has_items(self) -> bool:
        return bool(self.items)

    def items_within(self, start: int, tokens: int) -> list[PromptItem]:
        return [one for one in self.items if one.start + one.embeds > start and one.start < start + tokens]


@dataclass
class View:
    """An engine in which so many requests decode."""

    num_decodes: int = 0
    queue: list[OnePrompt] = field(default_factory=list)
    running: list[OnePrompt] = field(default_factory=list)
    cached: set[str] = field(default_factory=set)
    free_embeds: int = 256

    @property
    def num_requests(self) -> int:
        return self.num_running + len(self.queue)

    @property
    def num_running(self) -> int:
        return self.num_decodes + len(self.running)

    @property
    def decode_tokens(self) -> int:
        return self.num_decodes

    def least_itl(self) -> float | None:
        return 0.1 if self.num_running else None

    def decodes(self) -> Decodes:
        return Decodes(self.num_decodes, 0, 0.1)

    def prompts(self) -> Sequence[OnePrompt]:
        return self.running

    def waiting(self, count: int) -> Sequence[OnePrompt]:
        return self.queue[:count]

    def has_encoding(self, content: str) -> bool:
        return content in self.cached


def core(**options: object) -> EngineCore:
    return EngineCore(OmniSchedConfig(**options), FACTS, history=100)  # type: ignore[arg-type]


def picture(content: str, start: int = 0) -> PromptItem:
    return PromptItem(content, "image", 8, start)


def test_the_story_of_a_request_that_waits_for_the_lane() -> None:
    made = core(encode_ahead=True)
    ahead, view, prompt = made.ahead, View(num_decodes=1), OnePrompt("r", [picture("a")])
    assert ahead is not None
    made.enter("r", INTERACTIVE, 1.0)
    view.queue.append(prompt)
    chunk = ahead.next_chunk(prompt, 0, view, 2.0)
    assert (chunk.may_run, chunk.wanted) == (False, [picture("a")])
    made.validate()
    ((content, ticket, modality, embeds),) = ahead.take_actions().submit
    assert (content, modality, embeds) == ("a", "image", 8)
    assert ahead.encoded(content, ticket, 0.5, 3.0) == {"r"}
    made.validate()
    assert ahead.next_chunk(prompt, 0, view, 3.0).may_run
    assert ahead.load("a", 3.0)
    made.leave("r", 5, 4.0)
    made.validate()
    assert made.story("r").splitlines() == [
        "1.000000 entered interactive",
        "2.000000 placed would_stall_decode",
        "2.000000 held for 1 items",
        "3.000000 encoded a",
        "4.000000 left",
    ]
    assert len(made.book) == len(ahead.ledger) == 0


def test_an_item_that_cannot_be_encoded_fails_its_requests_once() -> None:
    made = core(encode_ahead=True)
    ahead, view = made.ahead, View(num_decodes=2)
    assert ahead is not None
    for name in ("r", "s"):
        made.enter(name, INTERACTIVE, 0.0)
        ahead.next_chunk(OnePrompt(name, [picture("a")]), 0, view, 0.0)
    (one,) = ahead.take_actions().submit
    ahead.failed(one.content, one.ticket, 1.0)
    made.validate()
    assert not ahead.next_chunk(OnePrompt("r", [picture("a")]), 0, view, 1.0).may_run
    assert ahead.take_failed() == {"r", "s"}
    assert ahead.take_failed() == set()


def test_a_late_answer_to_an_attempt_that_was_given_up_leaves_the_next_one_alone() -> None:
    made = core(encode_ahead=True)
    ahead, view = made.ahead, View(num_decodes=2)
    assert ahead is not None
    made.enter("r", INTERACTIVE, 0.0)
    ahead.next_chunk(OnePrompt("r", [picture("a")]), 0, view, 0.0)
    (first,) = ahead.take_actions().submit
    made.leave("r", 0, 1.0)
    made.enter("s", INTERACTIVE, 1.0)
    ahead.next_chunk(OnePrompt("s", [picture("a")]), 0, view, 1.0)
    assert ahead.encoded("a", first.ticket, 0.1, 2.0) == set()
    made.validate()
    actions = ahead.take_actions()
    assert [one.content for one in actions.submit] == list(actions.forget) == ["a"]
    assert ahead.encoded("a", actions.submit[0].ticket, 0.1, 3.0) == {"s"}


def test_a_session_and_an_item_without_data_are_left_to_the_engine() -> None:
    ahead = core(encode_ahead=True).ahead
    assert ahead is not None
    view = View(num_decodes=1)
    assert ahead.next_chunk(OnePrompt("session", [picture("a")], is_session=True), 0, view, 0.0).may_run
    assert ahead.next_chunk(OnePrompt("r", [picture("a")._replace(for_lane=False)]), 0, view, 0.0).may_run
    assert len(ahead.ledger) == 0


def test_an_item_that_the_step_encodes_by_a_graph_is_left_to_it() -> None:
    """Items of 8 embeddings have a graph, larger ones none; a small one is left to the step also beside a large one."""
    engine = EngineCore(OmniSchedConfig(encode_ahead=True), replace(FACTS, graph_embeds=8))
    ahead, view = engine.ahead, View(num_decodes=2)
    assert ahead is not None
    assert ahead.next_chunk(OnePrompt("small", [picture("a")]), 0, view, 0.0).may_run
    large = PromptItem("b", "image", 9, 100)
    assert ahead.next_chunk(OnePrompt("both", [picture("c"), large]), 0, view, 0.0).wanted == [large]
    assert (ahead.takes(picture("c")), ahead.takes(large)) == (False, True)


@pytest.mark.parametrize(
    ("start", "may_run", "tokens"), [(64, False, 63), (65, True, 64), (200, True, 199), (256, True, 200)]
)
def test_a_piece_ends_so_early_that_the_drafter_reads_no_missing_item(start: int, may_run: bool, tokens: int) -> None:
    """The drafter reads one token behind a piece, and behind a chunk of 256 tokens; a piece has 64 tokens or more."""
    engine = EngineCore(OmniSchedConfig(encode_ahead=True), replace(FACTS, read_ahead=1))
    ahead = engine.ahead
    assert ahead is not None
    chunk = ahead.next_chunk(OnePrompt("r", [picture("a", start)]), 0, View(num_decodes=2), 0.0)
    assert [one.content for one in chunk.wanted] == ["a"]
    assert (chunk.may_run, ahead.cut("r", 0, 200)) == (may_run, tokens)


def test_an_item_behind_what_the_drafter_reads_is_not_asked_for() -> None:
    ahead = EngineCore(OmniSchedConfig(encode_ahead=True), replace(FACTS, read_ahead=1)).ahead
    assert ahead is not None
    assert ahead.next_chunk(OnePrompt("r", [picture("a", 257)]), 0, View(num_decodes=2), 0.0) == (True, ())


@pytest.mark.parametrize(("items", "made", "tokens"), [(True, 0, 199), (False, 0, 200), (True, 3, 200)])
def test_the_first_token_waits_only_for_a_new_prompt_with_items(items: bool, made: int, tokens: int) -> None:
    """Another request is held, and would be for longer if this one began to decode."""
    engine = core(encode_rounds=True, interactive_ttft_ms=1e6)
    rounds = engine.rounds
    assert rounds is not None
    engine.costs.encoded("image", 8, 1.0)
    held = OnePrompt("held", [picture("x")])
    prompt = OnePrompt("r", [picture("a")] if items else [], made=made, runs=True)
    view = View(num_decodes=1, running=[prompt], queue=[held], cached={"a"})
    for one in (held, prompt):
        engine.enter(one.request_id, engine.classes["interactive"], 0.0)
    engine.begin_step(view, 16, 256, 0.0)
    assert rounds.cut(prompt, 0, 200, view, 256) == tokens
    assert rounds.cut(held, 0, 50, view, 256) == 0
    engine.validate()
    assert "round held" in engine.story("held")
    assert engine.begin_step(view, 16, 256, 0.1).aside == {"held"}


def test_limits_of_a_step_come_together() -> None:
    engine = core(batch_control="pid", batch_min=2, prefill_control="adaptive", prefill_min_tokens=10, pieces=True)
    assert engine.decides
    view = View(num_decodes=4, queue=[OnePrompt("r"), OnePrompt("s")])
    plan = engine.begin_step(view, 16, 256, 0.0)
    assert (plan.max_requests, plan.max_tokens, plan.encoder_embeds) == (4, 14, None)
    assert plan.longest == 10
    assert not core().decides


def waiting_of(made: EngineCore, prompt: OnePrompt, now: float) -> WaitingRequest:
    return made.waiting_request(prompt.request_id, 0, 10, prompt.items, len(prompt.items), now)


@pytest.mark.parametrize("encoded", [False, True])
def test_an_item_that_is_encoded_costs_nothing_more(encoded: bool) -> None:
    made = core(encode_ahead=True, waiting_order="sla")
    ahead, order, prompt = made.ahead, made.order, OnePrompt("r", [picture("a")])
    assert ahead is not None
    assert order is not None
    made.costs.encoded("image", 8, 1.5)
    made.enter("r", INTERACTIVE, 0.0)
    ahead.next_chunk(prompt, 0, View(num_decodes=1), 0.0)
    (one,) = ahead.take_actions().submit
    if encoded:
        ahead.encoded("a", one.ticket, 1.5, 1.5)
    # at 1.6 s of its 2 s, it is late only if an encode of 1.5 s is still to come
    (placed,) = order.plan([waiting_of(made, prompt, 1.6)], 1.6)
    assert placed.reason is (PlaceReason.DEADLINE if encoded else PlaceReason.LATE)


def test_encodes_of_a_request_that_misses_its_target_anyway_go_behind_those_of_others() -> None:
    made = core(encode_ahead=True, waiting_order="sla")
    ahead, order, view = made.ahead, made.order, View(num_decodes=3)
    assert ahead is not None
    assert order is not None
    made.costs.encoded("image", 8, 0.5)
    album = OnePrompt("album", [picture(f"page {n}", 8 * n) for n in range(9)])  # 4.5 s, and 2 s are its target
    others = [OnePrompt(name, [picture(f"of {name}")]) for name in "rs"]
    submitted = []
    for prompt in (album, *others):
        made.enter(prompt.request_id, INTERACTIVE, 0.0)
    prompts = {prompt.request_id: prompt for prompt in (album, *others)}
    for step in range(6):
        now = 0.5 * step
        waiting = [waiting_of(made, prompt, now) for prompt in prompts.values()]
        for placed in order.plan(waiting, now):
            if ahead.next_chunk(prompts[placed.request.request_id], 0, view, now).may_run:
                for item in prompts.pop(placed.request.request_id).items:
                    ahead.load(item.content, now)
        actions = ahead.take_actions().submit
        submitted += [one.content for one in actions]
        for one in actions:
            ahead.encoded(one.content, one.ticket, 0.5, now + 0.5)
        made.validate()
    assert submitted[:2] == ["of r", "of s"]
    assert submitted[2:] == [f"page {n}" for n in range(9)]

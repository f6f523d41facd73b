"""Test what `KvLending` adds to its policy: whom it admits beside a loan, and what it does in an empty engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.unit.core.engine.test_core import OnePrompt, View
from vllm_omni_sched.config.errors import RequestError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.lending import KvLending
from vllm_omni_sched.core.engine.requests import EngineFacts, KvBlocks, LendingFacts, PromptItem
from vllm_omni_sched.graph.order import INTERACTIVE
from vllm_omni_sched.resource.engine.lending import LendingReason

TOTAL, PICTURE = 100, 64
SLA = INTERACTIVE


@dataclass
class KvView(View):
    """An engine with a KV cache of 100 blocks of 16 tokens, of which each holds 8 embeddings."""

    held: int = 0
    prompt_blocks: int = 0
    first: OnePrompt | None = None
    first_blocks: int = 0
    lent: int = 0

    def kv_blocks(self) -> KvBlocks:
        free = TOTAL - self.held - self.lent
        blocked = self.first is not None and self.first_blocks > free - self.prompt_blocks
        return KvBlocks(free, self.prompt_blocks, self.num_running, self.first, self.first_blocks, blocked)


def engine(step_tokens: int = 1) -> tuple[EngineCore, KvView]:
    config = OmniSchedConfig(encode_ahead=True, kv_lending=0.5, itl_target_ms=0.01)
    facts = EngineFacts(16, 256, 128, 128, lending=LendingFacts(TOTAL, 16, 16, 8.0, step_tokens))
    core, view = EngineCore(config, facts), KvView()
    core.enter("a", SLA, 0.0)
    return core, view


def plan(core: EngineCore, view: KvView, now: float) -> int:
    assert core.lending is not None
    view.lent = core.lending.plan(view, now)
    return view.lent


def lending_of(core: EngineCore) -> KvLending:
    assert core.lending is not None
    return core.lending


def admits(core: EngineCore, *needs: int) -> list[int]:
    """Ask for requests that need so many blocks, in this order, and return what those need that are admitted."""
    lending, found = lending_of(core), []
    for blocks in needs:
        if lending.may_admit(OnePrompt("text"), blocks):
            lending.admitted(OnePrompt("text"), blocks)
            found.append(blocks)
    return found


def with_a_picture_at_work() -> tuple[EngineCore, KvView]:
    core, view = engine()
    view.num_decodes = 2
    assert core.ahead is not None
    prompt = OnePrompt("a", [PromptItem("picture", "image", PICTURE, 10)])
    assert not core.ahead.next_chunk(prompt, 0, view, 0.0).may_run
    assert plan(core, view, 0.0) == (PICTURE - 16) // 8
    assert [one.content for one in core.ahead.take_actions().submit] == ["picture"]
    return core, view


def test_nothing_is_sent_to_the_lane_before_it_has_its_loan() -> None:
    core, view = engine()
    assert core.ahead is not None
    view.num_decodes, view.held = 2, TOTAL
    core.ahead.next_chunk(OnePrompt("a", [PromptItem("picture", "image", PICTURE, 10)]), 0, view, 0.0)
    assert plan(core, view, 0.0) == 0
    assert not core.ahead.take_actions().submit
    view.held = 0
    assert plan(core, view, 0.1) == 6
    assert core.ahead.take_actions().submit


def test_an_idle_loan_is_not_used_before_a_plan_has_seen_the_encode() -> None:
    core, view = with_a_picture_at_work()
    assert core.ahead is not None
    core.ahead.encoded("picture", 1, 0.1, 0.1)
    assert plan(core, view, 0.1) == 6, "it is held"
    core.enter("b", SLA, 0.1)
    core.ahead.next_chunk(OnePrompt("b", [PromptItem("another", "image", PICTURE, 10)]), 0, view, 0.1)
    assert not core.ahead.take_actions().submit
    assert plan(core, view, 0.2) == 6
    assert [one.content for one in core.ahead.take_actions().submit] == ["another"]


def test_beside_a_loan_requests_are_admitted_as_far_as_they_leave_what_others_need() -> None:
    core, view = with_a_picture_at_work()
    view.held = 50
    plan(core, view, 0.1)
    growth = view.num_decodes  # one block for each
    assert TOTAL - 50 - 6 - growth == 42
    assert admits(core, 20, 20, 20) == [20, 20], "each needs one more block to decode until the encode has ended"
    plan(core, view, 0.2)
    assert admits(core, 42, 41) == [41]
    assert core.begin_step(view, 16, 256, 0.2).max_requests == 16


def test_a_request_that_goes_to_the_lane_leaves_its_place_to_none_that_is_longer() -> None:
    """The first two would fit together; then the second one waits for the lane, and the third one is looked at."""
    core, view = with_a_picture_at_work()
    assert core.ahead is not None
    core.enter("b", SLA, 0.1)
    view.held, view.first, view.first_blocks = 50, OnePrompt("text"), 10
    plan(core, view, 0.1)
    assert admits(core, 10) == [10]
    second = OnePrompt("b", [PromptItem("another", "image", PICTURE, 10)])
    assert not core.ahead.next_chunk(second, 0, view, 0.1).may_run
    assert TOTAL - 50 - 6 - 10 >= 31, "there is room for the third one now, but not for what the others will need"
    assert admits(core, 31, 30) == [30]


def test_a_request_that_is_refused_counts_as_one_that_waits_for_blocks() -> None:
    """A refused request counts even where the driver did not see it at the head of the queue."""
    core, view = with_a_picture_at_work()
    assert core.ahead is not None
    view.held = 50
    core.ahead.encoded("picture", 1, 0.1, 0.1)
    assert plan(core, view, 0.1) == 6, "it is held"
    assert admits(core, 43) == []
    assert plan(core, view, 0.2) == 0
    assert admits(core, 43, 7, 100) == [43, 7, 100], "the engine alone decides where nothing is lent"


def test_an_encode_under_way_counts_until_it_has_ended() -> None:
    core, view = with_a_picture_at_work()
    for step in range(5):  # 10 ms each
        core.step_ended(view, 0.01 * step, num_running=2, num_requests=2, prompt_tokens=0)
    plan(core, view, 0.1)
    assert admits(core, 80) == [80]
    core.costs.encoded("image", PICTURE, 1.0)  # 100 steps, and as many for safety: 13 blocks for each request
    plan(core, view, 0.2)
    assert admits(core, 80, 55) == [55]


def test_an_encode_behind_another_does_not_go_on_with_its_loan_where_running_requests_need_it() -> None:
    core, view = with_a_picture_at_work()
    assert core.ahead is not None
    for step in range(5):
        core.step_ended(view, 0.01 * step, num_running=2, num_requests=2, prompt_tokens=0)
    core.costs.encoded("image", PICTURE, 0.1)
    core.enter("b", SLA, 0.1)
    core.ahead.next_chunk(OnePrompt("b", [PromptItem("another", "image", PICTURE, 10)]), 0, view, 0.1)
    view.held = TOTAL - 6 - 5
    assert plan(core, view, 0.1) == 6
    assert not core.ahead.take_actions().submit, "two requests need 3 blocks each until both encodes have ended"
    view.held -= 1
    assert plan(core, view, 0.2) == 6
    assert [one.content for one in core.ahead.take_actions().submit] == ["another"]


def test_an_idle_loan_is_used_by_no_encode_for_which_there_is_no_room() -> None:
    core, view = engine()
    assert core.ahead is not None
    view.num_decodes = 2
    for content, size in (("small", 16), ("large", PICTURE)):
        core.ahead.next_chunk(OnePrompt("a", [PromptItem(content, "image", size, 10)]), 0, view, 0.0)
    lending_of(core).lent_blocks, view.lent = 6, 6
    view.held = TOTAL - 6 - 1
    assert plan(core, view, 0.0) == 5, "of two blocks that running requests need, one is not free"
    assert [one.content for one in core.ahead.take_actions().submit] == ["small"]


def test_steps_and_the_lane_share_the_memory() -> None:
    core, view = engine()
    lending = lending_of(core)
    assert core.ahead is not None
    assert lending.left_for_step() == 16
    lending.step_began(10)
    core.ahead.next_chunk(OnePrompt("a", [PromptItem("picture", "image", PICTURE, 10)]), 0, view, 0.0)
    view.num_decodes = 2
    assert plan(core, view, 0.0) == 6
    assert not core.ahead.take_actions().submit, "the step under way has a part of it"
    assert lending.left_for_step() == 0, "the lane is next"
    lending.step_out()
    plan(core, view, 0.1)
    assert core.ahead.take_actions().submit
    plan(core, view, 0.2)
    assert lending.left_for_step() == 0
    small = OnePrompt("b", [PromptItem("small", "image", 4, 10)])
    core.enter("b", SLA, 0.2)
    view.num_decodes = 0
    assert not core.ahead.next_chunk(small, 0, view, 0.2).may_run, "it goes to the lane, as no step can encode it"


def test_a_session_is_refused() -> None:
    core, _ = engine()
    before = len(core.book)
    with pytest.raises(RequestError, match=r"'kv_lending' takes no streaming input.*send it as one whole request"):
        core.enter("s", SLA, 0.1, session=True)
    assert len(core.book) == before


def test_nobody_waits_any_more_once_the_engine_is_empty() -> None:
    """The patience of an encode whose request has left is not that of the next one."""
    core, view = engine()
    assert core.ahead is not None
    core.ahead.next_chunk(OnePrompt("a", [PromptItem("picture", "image", PICTURE, 10)]), 0, view, 0.0)
    view.first, view.first_blocks, view.held = OnePrompt("text"), TOTAL, TOTAL - 10
    plan(core, view, 0.0)
    assert lending_of(core).reasons[LendingReason.REQUESTS_FIRST] == 1
    core.leave("a", 0, 0.1)
    core.enter("b", SLA, 60.0)
    core.ahead.next_chunk(OnePrompt("b", [PromptItem("another", "image", PICTURE, 10)]), 0, view, 60.0)
    assert plan(core, view, 60.0) == 0
    assert lending_of(core).reasons[LendingReason.REQUESTS_FIRST] == 2


def test_a_request_that_waits_for_the_first_encode_needs_nothing_before_its_end() -> None:
    """A request whose later item needs a loan would otherwise wait for itself."""
    core, view = engine()
    assert core.ahead is not None
    one = OnePrompt("a", [PromptItem("picture", "image", PICTURE, 320)], left=800, computed=320, runs=True)
    view.running, view.held, view.prompt_blocks = [one], TOTAL - 30, 50
    assert not core.ahead.next_chunk(one, 320, view, 0.0).may_run
    assert plan(core, view, 0.0) == 6
    assert admits(core, 1) == []
    assert [one.content for one in core.ahead.take_actions().submit] == ["picture"]
    core.enter("b", SLA, 0.1)
    core.ahead.next_chunk(OnePrompt("b", [PromptItem("another", "image", PICTURE, 10)]), 0, view, 0.1)
    assert plan(core, view, 0.1) == 6
    assert not core.ahead.take_actions().submit, "the first request goes on beside the second encode"
    core.ahead.encoded("picture", 1, 0.1, 0.2)
    plan(core, view, 0.2)
    assert not core.ahead.take_actions().submit, "it goes on now"


def test_prompts_that_may_wait_for_the_lane_again_leave_room_for_the_largest_loan() -> None:
    """Several requests would otherwise hold the blocks which the loan needs that each of them waits for."""
    core, view = engine()
    lending = lending_of(core)
    assert lending.most_blocks == 50
    later = OnePrompt("a", [PromptItem("picture", "image", PICTURE, 500)], left=600)
    short = OnePrompt("b", [PromptItem("picture", "image", PICTURE, 100)], left=200)
    assert plan(core, view, 0.0) == 0
    for prompt, blocks, may in ((later, 60, True), (later, 1, False), (short, 90, True), (OnePrompt("c"), 90, True)):
        assert lending.may_admit(prompt, blocks) is may
        if may:
            lending.admitted(prompt, blocks)
    view.running = [OnePrompt("a", later.items, left=300, computed=300, runs=True)]
    assert plan(core, view, 0.1) == 0
    assert not lending.may_admit(later, 13)
    assert lending.may_admit(later, 12), "with the 38 blocks of the first one"


def test_no_piece_runs_in_front_of_an_item_that_needs_a_loan() -> None:
    core, view = engine()
    assert core.ahead is not None
    view.num_decodes = 2
    for embeds, runs, may_run in ((16, False, True), (17, False, False), (17, True, True)):
        core.enter(f"{embeds} {runs}", SLA, 0.0)
        prompt = OnePrompt(f"{embeds} {runs}", [PromptItem(f"{embeds} {runs}", "image", embeds, 100)], runs=runs)
        assert core.ahead.next_chunk(prompt, 0, view, 0.0).may_run is may_run


def test_drafts_need_room_whether_they_are_accepted_or_not() -> None:
    core, view = engine(step_tokens=9)
    view.num_decodes, view.held = 2, TOTAL - 10
    assert core.ahead is not None
    core.ahead.next_chunk(OnePrompt("a", [PromptItem("picture", "image", PICTURE, 10)]), 0, view, 0.0)
    assert plan(core, view, 0.0) == 0, "two requests may need 4 steps of 9 tokens, and 8 ahead: 3 blocks each"
    view.held = TOTAL - 12
    assert plan(core, view, 0.1) == 6


def test_without_a_loan_any_number_is_admitted() -> None:
    core, view = engine()
    assert plan(core, view, 0.0) == 0
    assert admits(core, 60, 60, 60) == [60, 60, 60]
    assert core.begin_step(view, 16, 256, 0.0).max_requests == 16


def test_while_blocks_are_saved_for_an_encode_nobody_is_admitted() -> None:
    core, view = engine()
    assert core.ahead is not None
    view.num_decodes, view.held = 2, TOTAL - 4
    core.ahead.next_chunk(OnePrompt("a", [PromptItem("picture", "image", PICTURE, 10)]), 0, view, 0.0)
    assert plan(core, view, 0.0) == 0
    assert admits(core, 1) == [1]
    assert plan(core, view, 2.0) == 2
    assert core.begin_step(view, 16, 256, 2.0).max_requests == view.num_running


def test_when_the_last_request_leaves_all_returns_at_once() -> None:
    core, view = with_a_picture_at_work()
    assert core.lending is not None
    core.enter("b", SLA, 0.1)
    core.leave("b", 0, 0.2)
    assert core.lending.lent_blocks == 6
    core.leave("a", 0, 0.3)
    assert core.lending.lent_blocks == 0
    view.lent = 0
    assert plan(core, view, 0.4) == 0

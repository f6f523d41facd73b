"""Test what `KvLending` adds to its policy: whom it admits beside a loan, and what it does in an empty engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.unit.core.engine.test_core import OnePrompt, View
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.core.engine.requests import EngineFacts, KvBlocks, LendingFacts, PromptItem
from vllm_omni_sched.graph.order import INTERACTIVE

TOTAL, PICTURE = 100, 64
SLA = INTERACTIVE


@dataclass
class KvView(View):
    """An engine with a KV cache of 100 blocks of 16 tokens, of which each holds 8 embeddings."""

    held: int = 0
    prompt_blocks: int = 0
    waits: list[int] = field(default_factory=list)
    lent: int = 0

    def kv_blocks(self) -> KvBlocks:
        free = TOTAL - self.held - self.lent
        blocked = bool(self.waits) and self.waits[0] > free - self.prompt_blocks
        return KvBlocks(free, self.prompt_blocks, self.num_decodes, blocked, self.waits)


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


def test_beside_a_loan_requests_are_admitted_as_far_as_they_leave_what_others_need() -> None:
    core, view = with_a_picture_at_work()
    view.held, view.waits = 50, [20, 20, 20]
    plan(core, view, 0.1)
    growth = view.num_decodes  # one block for each
    assert TOTAL - 50 - 6 - growth == 42
    assert core.begin_step(view, 16, 256, 0.1).max_requests == view.num_running + 2
    view.waits = [43]
    plan(core, view, 0.2)
    assert core.begin_step(view, 16, 256, 0.2).max_requests == view.num_running


def test_a_request_that_is_admitted_beside_a_loan_has_room_to_decode_until_the_encode_has_ended() -> None:
    core, view = with_a_picture_at_work()
    view.held, view.waits = 50, [20, 21]
    plan(core, view, 0.1)
    assert core.begin_step(view, 16, 256, 0.1).max_requests == view.num_running + 1, "each needs one more block"


def test_an_encode_under_way_counts_until_it_has_ended() -> None:
    core, view = with_a_picture_at_work()
    for step in range(5):  # 10 ms each
        core.step_ended(view, 0.01 * step, num_running=2, num_requests=2, prompt_tokens=0)
    view.waits = [80]
    plan(core, view, 0.1)
    assert core.begin_step(view, 16, 256, 0.1).max_requests == view.num_running + 1
    core.costs.encoded("image", PICTURE, 1.0)  # 100 steps, and as many for safety: 13 blocks for each request
    plan(core, view, 0.2)
    assert core.begin_step(view, 16, 256, 0.2).max_requests == view.num_running


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
    view.waits = [20, 20, 20]
    assert plan(core, view, 0.0) == 0
    assert core.begin_step(view, 16, 256, 0.0).max_requests == 16


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

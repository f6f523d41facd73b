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

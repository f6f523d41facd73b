"""The rules of `EncodeRounds`, one by one."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_omni_sched.resource.engine.encode_rounds import (
    EncodeRounds,
    PromptWork,
    RoundReason,
    RoundSnapshot,
    RoundStep,
)


def clip(key: str, encode: float = 0.5, prefill: float = 1.0, due: float = 20.0, **facts: Any) -> PromptWork:
    return PromptWork(key, encode, prefill, due, **facts)


def snapshot(*prompts: PromptWork, unharmed: int = 0, broken: int = 0, itl: float = 0.1, **costs: Any) -> RoundSnapshot:
    facts = {"token_budget": 1000, "base_seconds": 0.02, "token_seconds": 1e-4, **costs}
    return RoundSnapshot(unharmed, broken, itl, prompts, **facts)


def asked(step: RoundStep, *prompts: PromptWork) -> list[RoundReason]:
    return [step.encode(one.key, one.encode_seconds, one.prefill_seconds, one.deadline) for one in prompts]


def test_while_nobody_decodes_several_are_encoded_in_one_round():
    clips = [clip("a"), clip("b"), clip("c")]
    step = EncodeRounds().step(snapshot(*clips), 0.0)
    assert (step.opened, step.gathers, step.joining) == (RoundReason.NOBODY_DECODES, True, 3)
    assert asked(step, *clips) == [RoundReason.NOBODY_DECODES] * 3


def test_as_many_as_let_the_first_be_in_time():
    clips = [clip("a", due=2.2), clip("b"), clip("c")]  # the first is through at 1.5: one more encode, not two
    step = EncodeRounds().step(snapshot(*clips), 0.0)
    assert step.joining == 2
    assert asked(step, *clips) == [
        RoundReason.NOBODY_DECODES,
        RoundReason.NOBODY_DECODES,
        RoundReason.FIRST_TOKEN_DUE,
    ]


def test_a_prompt_that_is_being_computed_is_not_made_late():
    computing = PromptWork("first", 0.0, 1.0, 1.2, runs=True)
    step = EncodeRounds().step(snapshot(computing, clip("next")), 0.0)
    assert (step.gathers, asked(step, clip("next"))) == (False, [RoundReason.FIRST_TOKEN_DUE])


def test_beside_decodes_an_item_goes_that_fits_and_the_step_has_fewer_tokens_for_it():
    small = clip("small", encode=0.05)
    step = EncodeRounds().step(snapshot(small, unharmed=2), 0.0)
    assert step.prompt_tokens == 200  # 0.9 of 100 ms, less 20 ms and 50 ms
    assert asked(step, small, small) == [RoundReason.FITS, RoundReason.HELD]


def test_what_was_never_timed_is_encoded_at_once():
    step = EncodeRounds().step(snapshot(clip("new", encode=0.0), unharmed=1), 0.0)
    assert asked(step, clip("new", encode=0.0)) == [RoundReason.FITS]


def test_who_would_break_a_promise_is_held():
    step = EncodeRounds().step(snapshot(clip("a"), unharmed=1), 0.0)
    assert (step.opened, asked(step, clip("a"))) == (None, [RoundReason.HELD])


def test_those_whose_promise_is_broken_are_held_up_for_half_of_the_time_at_most():
    policy = EncodeRounds()
    first = policy.step(snapshot(clip("a"), broken=1), 10.0)
    assert asked(first, clip("a")) == [RoundReason.BROKEN_BEFORE]
    # it took half a second, and for another half the others have the steps
    assert asked(policy.step(snapshot(clip("b"), broken=1), 10.9), clip("b")) == [RoundReason.HELD]
    assert asked(policy.step(snapshot(clip("b"), broken=1), 11.1), clip("b")) == [RoundReason.BROKEN_BEFORE]


def test_a_round_opens_when_more_would_be_late_than_are_held_up():
    policy = EncodeRounds()
    policy.ended("before", 200)  # answers have 200 tokens: who decodes needs 4 s more
    clips = [clip("a", due=1.55), clip("b", due=4.0)]  # through at 1.5 and at 3.0
    assert policy.step(snapshot(*clips, unharmed=1), 0.0).opened is RoundReason.GOODPUT
    assert policy.step(snapshot(*clips, unharmed=2), 0.0).opened is None  # as many
    assert policy.step(snapshot(clips[1], unharmed=1), 0.0).opened is None  # one, and there is time


def test_who_is_late_already_is_no_reason_to_break_a_promise():
    policy = EncodeRounds()
    policy.ended("before", 200)
    clips = [clip(str(i), due=-1.0) for i in range(5)]
    assert policy.step(snapshot(*clips, unharmed=1), 0.0).opened is None


def test_a_first_token_waits_while_an_item_is_held_and_its_deadline_allows():
    step = EncodeRounds().step(snapshot(PromptWork("done", 0.0, 0.0, 9.0, runs=True), clip("a"), unharmed=1), 0.0)
    assert step.first_token_waits(0.0, 9.0)
    assert not step.first_token_waits(0.0, 0.4)  # the encode alone takes longer


@pytest.mark.parametrize("unharmed", [0, 1])
def test_a_first_token_waits_for_nobody_who_is_not_held(unharmed: int):
    fits = clip("a", encode=0.01) if unharmed else clip("a")
    assert not EncodeRounds().step(snapshot(fits, unharmed=unharmed), 0.0).first_token_waits(0.0, 9.0)

"""Encoding in rounds, on the real scheduler. Tokens are made up; decisions are real."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.steered import EMBEDS, Clock, request, scheduler_with
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.testing import make_item, run_step


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def rounds(**config: Any) -> Any:
    """A scheduler that knows that a picture takes a second to encode, and has promised gaps of 100 ms."""
    scheduler = scheduler_with({"encode_rounds": True}, **config)
    scheduler.omni.policies.core.costs.encoded("image", EMBEDS, 1.0)
    return scheduler


def picture(id_: str, prompt: int = 20, at: int = 4, max_tokens: int = 4) -> Any:
    return request(id_, prompt, [make_item(at, EMBEDS, f"of {id_}")], max_tokens=max_tokens, omni_ttft_ms=1e6)


def steps(scheduler: Any, clock: Clock, most: int = 60) -> list[Any]:
    """All steps until nobody is left, each a millisecond."""
    taken = []
    while scheduler.requests and len(taken) < most:
        clock.now += 0.001
        taken.append(run_step(scheduler).scheduled)
    assert not scheduler.requests
    return taken


def test_a_picture_is_held_while_somebody_decodes_and_holds_up_nobody(clock: Clock):
    scheduler = rounds()
    scheduler.add_request(request("decodes", max_tokens=5))
    run_step(scheduler)
    scheduler.add_request(picture("held"))
    scheduler.add_request(request("text", max_tokens=5))
    taken = steps(scheduler, clock)
    begins = {
        id_: next(i for i, one in enumerate(taken) if id_ in one.num_scheduled_tokens) for id_ in ("held", "text")
    }
    assert begins["text"] <= 1
    first = taken[begins["held"]]
    assert (first.scheduled_encoder_inputs, set(first.num_scheduled_tokens)) == ({"held": [0]}, {"held"})
    assert begins["held"] >= 4
    metrics = scheduler.omni.metrics.encode_rounds
    assert (metrics["nobody_decodes"], metrics["held"] > 2) == (1, True)


def test_several_are_encoded_in_the_first_step_of_a_round_and_decode_together(clock: Clock):
    scheduler = rounds()
    for id_ in "abc":
        scheduler.add_request(picture(id_, prompt=90))
    taken = steps(scheduler, clock)
    assert taken[0].scheduled_encoder_inputs == {"a": [0], "b": [0], "c": [0]}
    assert taken[0].num_scheduled_tokens == {"a": 21, "b": 21, "c": 21}
    assert taken[1].num_scheduled_tokens == {"a": 64}  # then, as ever, the first one first
    assert scheduler.scheduler_config.long_prefill_token_threshold == 0


def test_text_before_a_held_picture_is_computed(clock: Clock):
    scheduler = rounds(max_num_batched_tokens=256)
    scheduler.add_request(request("decodes", max_tokens=8))
    run_step(scheduler)
    scheduler.add_request(picture("held", prompt=120, at=100))
    taken = steps(scheduler, clock)
    assert taken[0].num_scheduled_tokens == {"decodes": 1, "held": 100}
    assert taken[1].num_scheduled_tokens == {"decodes": 1}


def test_a_picture_that_fits_beside_decodes_is_encoded_at_once(clock: Clock):
    scheduler = scheduler_with({"encode_rounds": True})
    scheduler.omni.policies.core.costs.encoded("image", EMBEDS, 0.01)
    scheduler.add_request(request("decodes", max_tokens=8))
    run_step(scheduler)
    scheduler.add_request(picture("quick"))
    assert run_step(scheduler).scheduled.scheduled_encoder_inputs == {"quick": [0]}
    assert scheduler.omni.metrics.encode_rounds["fits"] == 1


def test_what_an_encode_takes_is_learnt_from_its_step(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    scheduler = scheduler_with({"encode_rounds": True})
    scheduler.add_request(picture("a"))
    schedule = scheduler.schedule

    def slow() -> Any:
        output = schedule()
        clock.now += 0.4
        return output

    monkeypatch.setattr(scheduler, "schedule", slow)
    run_step(scheduler)
    assert scheduler.omni.policies.core.costs.encode_seconds("image", EMBEDS) == pytest.approx(0.4)


def test_items_that_must_not_be_split_are_encoded_one_by_one(clock: Clock):
    scheduler = rounds(disable_chunked_mm_input=True)
    for id_ in "abc":
        scheduler.add_request(picture(id_, prompt=40))
    taken = steps(scheduler, clock)
    assert sum(len(one.scheduled_encoder_inputs) for one in taken) == 3


def test_the_lane_and_rounds_exclude_each_other():
    with pytest.raises(ConfigError, match="'encode_rounds' and 'encode_ahead' exclude each other"):
        scheduler_with({"encode_rounds": True, "encode_ahead": True})

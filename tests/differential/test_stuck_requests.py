"""Requests that vLLM's scheduler never finishes: ours finishes them, or says what they wait for."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.drafting import Drafting
from tests.support.environments import FIRST_ENVIRONMENT
from vllm_omni_sched import OmniScheduler, OmniSyncScheduler
from vllm_omni_sched.testing import drain, make_item, make_request, make_scheduler, make_session_update, run_step

MAX_STEPS = 60
ITEM = 8  # tokens and embeddings of a picture
SCHEDULERS = {(True, True): OmniScheduler, (True, False): OmniSyncScheduler, (False, True): AsyncScheduler}


def scheduler_of(*, ours: bool, asynchronous: bool, drafts: bool = False, **config: Any) -> Any:
    cls: type = SCHEDULERS.get((ours, asynchronous), Scheduler)
    if drafts:
        cls = type(f"Drafting{cls.__name__}", (Drafting, cls), {})
    how = {"max_num_batched_tokens": 64, "encoder_budget": 64, "encoder_cache_size": ITEM, **config}
    options = {"metrics": False} if ours else None
    return make_scheduler(cls, async_scheduling=asynchronous, max_item_embeds=ITEM, options=options, **how)


def is_stuck(scheduler: Any) -> bool:
    """Return whether requests are left that get no step; those that ended have all of their tokens."""
    try:
        steps = drain(scheduler, max_steps=MAX_STEPS)
    except RuntimeError:
        return True
    ended = [one for step in steps for of in (step.outputs or {}).values() for one in of.outputs if one.finish_reason]
    assert {str(one.finish_reason) for one in ended} == {"length"}
    return False


ASYNC = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
RUNNER = pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])


def add_pictures(scheduler: Any, request_id: str, *starts: int) -> None:
    items = [make_item(start, ITEM, f"{request_id}-{start}") for start in starts]
    scheduler.add_request(make_request(request_id, starts[-1] + ITEM + 2, items, max_tokens=3))


@ASYNC
@RUNNER
def test_adjacent_pictures_pass_a_cache_for_one_under_a_drafter(asynchronous: bool, v2: bool) -> None:
    scheduler = scheduler_of(ours=True, asynchronous=asynchronous, drafts=True, use_v2_model_runner=v2)
    for number in range(3):
        add_pictures(scheduler, f"r{number}", 2, 2 + ITEM, 2 + 2 * ITEM, 30 + ITEM)
    assert not is_stuck(scheduler)
    assert scheduler.encoder_cache_manager.num_free_slots == 0 or not scheduler.encoder_cache_manager.cached


@ASYNC
def test_vllms_own_scheduler_is_stuck_where_ours_mends_it(asynchronous: bool) -> None:
    scheduler = scheduler_of(ours=False, asynchronous=asynchronous, drafts=True)
    add_pictures(scheduler, "r", 2, 2 + ITEM)
    assert is_stuck(scheduler) is FIRST_ENVIRONMENT


WHOLE = {"disable_chunked_mm_input": True, "long_prefill_token_threshold": ITEM - 3, "encoder_cache_size": 64}


@ASYNC
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
def test_an_item_that_may_not_be_cut_passes_a_threshold_below_it(asynchronous: bool, drafts: bool) -> None:
    scheduler = scheduler_of(ours=True, asynchronous=asynchronous, drafts=drafts, **WHOLE)
    for number in range(3):
        add_pictures(scheduler, f"r{number}", 7, 7 + ITEM, 40)
    assert not is_stuck(scheduler)
    assert scheduler.scheduler_config.long_prefill_token_threshold == ITEM - 3


@ASYNC
def test_vllms_own_scheduler_is_stuck_before_such_an_item(asynchronous: bool) -> None:
    scheduler = scheduler_of(ours=False, asynchronous=asynchronous, **WHOLE)
    for number in range(2):  # the threshold does not hold for one that is alone
        add_pictures(scheduler, f"r{number}", 7)
    assert is_stuck(scheduler) is not FIRST_ENVIRONMENT


@RUNNER
def test_who_waits_for_places_that_idle_sessions_have_is_logged(v2: bool, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = scheduler_of(ours=True, asynchronous=True, max_num_seqs=2, use_v2_model_runner=v2)
    for name in ("first", "second"):
        scheduler.add_request(make_request(name, 4, resumable=True, max_tokens=1))
    drain(scheduler)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        run_step(scheduler)
        assert not caplog.messages
        for number in range(3):
            scheduler.add_request(make_request(f"r{number}", 4, max_tokens=1))
        assert is_stuck(scheduler)
        [said] = caplog.messages
    assert said.startswith("Request r0 and 2 more wait until one of 2 streaming sessions ends")
    scheduler.add_request(make_session_update("first", last=True))
    assert not is_stuck(scheduler)

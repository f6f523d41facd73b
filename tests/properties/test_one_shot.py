"""A prompt that comes whole costs no more than under vLLM's own scheduler: counted, not timed.

Its items stay in vLLM's own list until something needs more than that.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from vllm_omni_sched import OmniScheduler, compat
from vllm_omni_sched.items import FeatureList
from vllm_omni_sched.testing import drain, make_item, make_request, make_scheduler, run_step

STEP_TOKENS = 1_024


def scheduler_of(cls: type | None, **config: Any) -> Any:
    options = None if cls is None else {"metrics": False}
    return make_scheduler(cls, **{"max_num_batched_tokens": STEP_TOKENS, "options": options, **config})


def prompt(request_id: str, num_items: int, **options: Any) -> Any:
    """Return a request whose prompt tokens are items of their own, all different."""
    features = [make_item(i, 1, f"{request_id}/{i}") for i in range(num_items)]
    return make_request(request_id, num_items, features, max_tokens=1, **options)


def python_calls(cls: type | None, num_items: int, **config: Any) -> int:
    """Calls of Python functions while a prompt goes from add to its end, its making not included."""
    scheduler = scheduler_of(cls, **config)
    scheduler.add_request(prompt("warm-up", 8))
    drain(scheduler)
    request = prompt("a", num_items)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        scheduler.add_request(request)
        drain(scheduler)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("use_v2_model_runner", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_call_more_an_item_than_vllm(async_scheduling: bool, use_v2_model_runner: bool) -> None:
    config = {"async_scheduling": async_scheduling, "use_v2_model_runner": use_v2_model_runner}
    by_item = {
        cls: (python_calls(cls, 4 * STEP_TOKENS, **config) - python_calls(cls, 2 * STEP_TOKENS, **config))
        / (2 * STEP_TOKENS)
        for cls in (None, OmniScheduler)
    }
    # For V2 ours asks about its data in a call, where vLLM builds a set without one.
    assert by_item[OmniScheduler] <= by_item[None] + (1.1 if use_v2_model_runner else 0.1)


class Kept(list):  # type: ignore[type-arg]
    """Types that `mm_features` of a request had, in the order in which they came."""

    def see(self, request: Any) -> None:
        if not self or self[-1] is not type(request.mm_features):
            self.append(type(request.mm_features))


def kinds_of(scheduler: Any, request: Any) -> list[type]:
    kept = Kept()
    scheduler.add_request(request)
    kept.see(request)
    while request.request_id in scheduler.requests:
        run_step(scheduler)
        kept.see(request)
    return kept


@pytest.mark.parametrize("use_v2_model_runner", [False, True], ids=["V1", "V2"])
def test_the_list_stays_vllms_own(use_v2_model_runner: bool) -> None:
    scheduler = scheduler_of(OmniScheduler, use_v2_model_runner=use_v2_model_runner)
    native = compat.native_windows(compat.SCHEDULER)
    assert kinds_of(scheduler, prompt("a", 3 * STEP_TOKENS)) == [list if native else FeatureList]
    assert scheduler.omni.inputs.num_indexed == 0


def test_who_needs_an_index_gets_one() -> None:
    scheduler = scheduler_of(OmniScheduler, enable_prefix_caching=True)
    nested = make_request("nested", 16, [make_item(0, 8, "long"), make_item(2, 2, "short")], max_tokens=1)
    assert kinds_of(scheduler, nested) == [FeatureList]
    first, second = (
        make_request(name, 64, [make_item(i * 4, 4, f"item-{i}") for i in range(16)], max_tokens=1)
        for name in ("first", "second")
    )
    native = compat.native_windows(compat.SCHEDULER)
    assert kinds_of(scheduler, first) == [list if native else FeatureList]
    # The same prompt again: it begins behind what is in the prefix cache.
    assert kinds_of(scheduler, second) == ([list, FeatureList] if native else [FeatureList])
    session = make_request("session", 4, [make_item(0, 4, "frame")], max_tokens=1, resumable=True)
    scheduler.add_request(session)
    assert type(session.mm_features) is FeatureList
    assert scheduler.omni.inputs.num_indexed == 1

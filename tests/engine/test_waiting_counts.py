"""Waiting requests by class on the real scheduler: their sum is vLLM's own count. Tokens are made up."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

import vllm_omni_sched
from tests.engine.conftest import Results
from tests.engine.harness.engines import VARIANTS, cases
from tests.support.steered import EMBEDS, Clock, request, scheduler_with
from vllm_omni_sched.monitor.counts import CLASSES
from vllm_omni_sched.monitor.exposition import render
from vllm_omni_sched.testing import make_item, make_session_update, run_step

ORDERS = pytest.mark.parametrize("order", ["arrival", "sla"])
NAME = "vllm:omni_sched_waiting_requests"


def scheduler(order: str, **config: Any) -> Any:
    return scheduler_with({"waiting_order": order, "slo_metrics": True}, log_stats=True, **config)


def waiting(scheduler: Any) -> dict[str, int]:
    """Return the requests that wait by class, without those that are 0; their sum must be what vLLM counts."""
    counts = scheduler.omni.metrics.waiting_requests
    stats = scheduler.make_stats()
    assert sum(counts.values()) == stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
    assert min(counts.values()) >= 0
    return {name: number for name, number in counts.items() if number}


def test_a_request_that_is_refused_counts_in_no_class():
    one = scheduler("arrival")
    one.add_request(request("bad", omni_ttft_ms=-1))
    assert one.omni.metrics.waiting_requests == dict.fromkeys(CLASSES, 0)
    run_step(one)
    assert waiting(one) == {}


def test_without_the_option_there_is_no_such_metric():
    on, off = scheduler("sla"), scheduler_with({"waiting_order": "sla"})
    off.add_request(request("r"))
    assert off.omni.policies.waiting is None
    assert NAME not in render(off.omni.metrics).decode()
    assert f'{NAME}{{class="batch"}} 0.0' in render(on.omni.metrics).decode()


class Traffic:
    """Requests and sessions that come, go on, and are aborted at random."""

    def __init__(self, scheduler: Any, seed: int) -> None:
        self.scheduler, self.chance = scheduler, random.Random(seed)
        self.left = 40
        self.sessions: dict[str, int] = {}  # chunks still to come

    def step(self) -> None:
        chance, scheduler = self.chance, self.scheduler
        if self.left and chance.random() < 0.5:
            self.left -= 1
            self._arrive(f"r{self.left}")
        for id_ in sorted(self.sessions):
            if id_ not in scheduler.requests:
                del self.sessions[id_]
            elif chance.random() < 0.2:
                self._continue(id_)
        if scheduler.requests and chance.random() < 0.05:
            victim = chance.choice(sorted(scheduler.requests))
            scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
            self.sessions.pop(victim, None)
        if scheduler.running and chance.random() < 0.05:
            victim = scheduler.running.pop()
            scheduler._preempt_request(victim, 0.0)
        waiting(scheduler)
        run_step(scheduler)

    def _arrive(self, id_: str) -> None:
        chance = self.chance
        if chance.random() < 0.3:
            self.sessions[id_] = chance.randrange(1, 4)
            self.scheduler.add_request(make_session_update(id_, chance.randrange(1, 30), max_tokens=3))
            return
        items = [make_item(4, EMBEDS, f"picture-{chance.randrange(9)}")] if chance.random() < 0.5 else []
        prompt, name = chance.randrange(12, 60), chance.choice(CLASSES)
        self.scheduler.add_request(request(id_, prompt, items, max_tokens=chance.randrange(1, 40), omni_class=name))

    def _continue(self, id_: str) -> None:
        last = self.sessions[id_] == 0
        self.scheduler.add_request(make_session_update(id_, 1 if last else 9, last=last, max_tokens=3))
        if last:
            del self.sessions[id_]
        else:
            self.sessions[id_] -= 1


@ORDERS
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_the_sum_is_what_vllm_counts(order, policy, async_scheduling, v2, seed):
    one = scheduler(
        order,
        policy=policy,
        async_scheduling=async_scheduling,
        use_v2_model_runner=v2,
        num_blocks=24,
        max_num_seqs=6,
    )
    preempted = count_calls(one, "_preempt_request")
    traffic = Traffic(one, seed)
    most = 0
    for _ in range(5000):
        traffic.step()
        most = max(most, sum(waiting(one).values()))
        if not traffic.left and not one.requests:
            break
    assert not one.requests
    assert waiting(one) == {}
    assert len(one.omni.policies.waiting) == 0
    assert most >= 3
    assert preempted


def count_calls(scheduler: Any, name: str) -> list[str]:
    """Return a list that gets the id of each request for which this method is called from now on."""
    method, calls = getattr(scheduler, name), []

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(request.request_id)
        return method(request, *args, **kwargs)

    setattr(scheduler, name, counted)
    return calls


OURS = str(Path(vllm_omni_sched.__file__).parent)


def lines_run(call: Callable[[], object]) -> int:
    """Return how many lines of this package a call runs; each turn of a loop counts."""
    lines = 0

    def local(_: FrameType, event: str, __: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: local if frame.f_code.co_filename.startswith(OURS) else None)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@ORDERS
def test_a_step_does_no_more_when_many_wait(order: str, monkeypatch: pytest.MonkeyPatch):
    """Nobody walks over the queue: a step runs the same lines with ten waiting requests and with a thousand."""
    Clock(monkeypatch)  # nobody ages
    lines = {}
    for number in (10, 1000):
        one = scheduler(order, max_num_seqs=2)
        for i in range(number + 2):
            one.add_request(request(f"r{i}", max_tokens=40, omni_class="batch"))
        run_step(one)
        assert waiting(one) == {"batch": number}
        lines[number] = lines_run(lambda one=one: run_step(one))
        assert waiting(one) == {"batch": number}
    assert lines[10] == lines[1000] > 10


COUNTING = [variant for variant in VARIANTS if variant.omni_sched and variant.omni_sched.get("slo_metrics")]


@pytest.mark.parametrize("variant", cases((variant,) for variant in COUNTING))
def test_the_sum_is_what_vllm_counts_in_a_real_engine(in_process: Results, variant):
    """After each step is scheduled, and after each one's tokens; with sessions, and in some engines preemptions."""
    found = in_process.of_ours(variant.name, "crowd")["waiting"]
    assert found["differences"] == []
    assert found["most"] >= 2
    assert found["at_the_end"] == dict.fromkeys(CLASSES, 0)


def test_real_engines_are_asked_in_both_orders():
    assert {variant.omni_sched.get("waiting_order", "arrival") for variant in COUNTING} == {"arrival", "sla"}

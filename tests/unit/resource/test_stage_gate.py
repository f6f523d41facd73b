"""The gate before a stage: what it releases, what it holds, and for how long."""

import math
import random
from dataclasses import replace

import pytest

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.balance import ReplicaState, RoundRobin
from vllm_omni_sched.resource.stage_gate import GatePlan, GateRequest, GateSnapshot, StageGate

DICE = random.Random(0)


def at(replica_id=0, in_flight=0, limit=4, remaining=None, **more):
    work = float(in_flight) if remaining is None else remaining
    return ReplicaState(replica_id, work, in_flight=in_flight, limit=limit, **more)


def some(names, **more):
    return tuple(GateRequest(name, cost_seconds=1.0, **more) for name in names)


def plan(gate, waiting, *replicas, now=0.0):
    return gate.plan(GateSnapshot(now, tuple(waiting), replicas), DICE)


def told(made):
    return [(one.request_id, one.replica_id, one.reason.value) for one in made.releases]


def held(made):
    return {name: reason.value for name, reason in made.held}


def test_an_idle_replica_is_filled_at_once_and_up_to_its_limit():
    made = plan(StageGate(), some("abcde"), at(limit=3))
    assert told(made) == [(name, 0, "idle") for name in "abc"]
    assert held(made) == {"d": "no_room", "e": "no_room"}
    assert made.wake_at is None


def test_replicas_are_picked_by_cost_and_a_sick_one_never():
    waiting = [GateRequest("long", 5.0), *some("abc")]
    made = plan(StageGate(), waiting, at(0), at(1), at(2, healthy=False))
    assert told(made) == [("long", 0, "idle"), ("a", 1, "idle"), ("b", 1, "idle"), ("c", 1, "idle")]
    turns = plan(StageGate(RoundRobin()), waiting, at(0), at(1))
    assert [one.replica_id for one in turns.releases] == [0, 1, 0, 1]
    assert held(plan(StageGate(), some("a"), at(healthy=False))) == {"a": "no_room"}


def test_a_cache_of_the_request_draws_it():
    waiting = [replace(some("a")[0], warm=((1, 1.0),))]
    assert told(plan(StageGate(), waiting, at(0), at(1))) == [("a", 1, "idle")]


def test_where_all_are_busy_a_request_is_held_for_the_batch_until_its_window_ends():
    gate = StageGate()
    made = plan(gate, some("a"), at(in_flight=1), now=10.0)
    assert (told(made), held(made), made.wake_at) == ([], {"a": "window"}, 10.05)
    made = plan(gate, some("ab"), at(in_flight=1), now=10.04)
    assert (told(made), held(made), made.wake_at) == ([], {"a": "window", "b": "window"}, 10.05)
    made = plan(gate, some("ab"), at(in_flight=1), now=10.05)
    assert told(made) == [("a", 0, "window_over"), ("b", 0, "window_over")]


def test_a_full_batch_goes_at_once_to_the_replica_it_fills():
    made = plan(StageGate(), some("ab"), at(0, in_flight=1), at(1, in_flight=2, remaining=9))
    assert told(made) == [("a", 1, "batch_full"), ("b", 1, "batch_full")]


def test_what_shares_no_batch_is_not_held():
    made = plan(StageGate(), [*some("a"), *some("b", mergeable=False)], at(in_flight=1))
    assert (told(made), held(made)) == ([("b", 0, "alone")], {"a": "window"})
    assert told(plan(StageGate(max_hold_seconds=0), some("a"), at(in_flight=1))) == [("a", 0, "window_over")]


def test_without_credits_it_waits_and_others_go():
    made = plan(StageGate(), [*some("a", has_credits=False), *some("b")], at())
    assert (told(made), held(made)) == ([("b", 0, "idle")], {"a": "no_credits"})
    assert made.wake_at is None


def test_the_low_class_has_its_share_and_no_more_while_others_wait():
    gate, went = StageGate(min_share=0.25, max_passed=1000), []
    for number in range(40):
        high, low = some([f"h{number}", f"i{number}"]), some([f"l{k:02}" for k in range(20)], low=True)
        waiting = [*high, *(one for one in low if one.request_id not in went)]
        went += [one.request_id for one in plan(gate, waiting, at(limit=1)).releases]
    assert [name[0] for name in went[:8]] == list("hhhlhhhl")
    assert sum(name[0] == "l" for name in went) == 10


def test_without_a_share_the_low_class_waits_until_it_is_overdue():
    gate = StageGate(min_share=0, max_passed=3)
    low, went = some(["low"], low=True), []
    plan(gate, low, at(limit=0))
    for number in range(5):
        went += told(plan(gate, [*some([f"h{number}"]), *(() if "low" in str(went) else low)], at(limit=1)))
    assert [(name, why) for name, _, why in went[:4]] == [
        *((f"h{i}", "idle") for i in range(3)),
        ("low", "overdue"),
    ]


def test_one_that_is_overdue_and_has_no_credits_holds_back_all_others():
    gate, first = StageGate(max_passed=2), some("a", has_credits=False)
    plan(gate, first, at(limit=0))
    assert [one[0] for one in told(plan(gate, [*some("bcd"), *first], at()))] == ["b", "c"]
    assert gate.passed("a") == 2
    made = plan(gate, [*some("d"), *first], at())
    assert (told(made), held(made)) == ([], {"d": "behind_overdue", "a": "no_credits"})
    assert told(plan(gate, [*some("d"), *some("a")], at())) == [("a", 0, "overdue"), ("d", 0, "idle")]


def test_a_release_that_came_to_nothing_keeps_its_place_and_who_leaves_is_forgotten():
    gate = StageGate()
    assert told(plan(gate, some("a"), at(), now=1.0)) == [("a", 0, "idle")]
    assert plan(gate, some("a"), at(in_flight=1), now=1.02).wake_at == 1.05
    plan(gate, (), at(), now=2.0)
    assert plan(gate, some("a"), at(in_flight=1), now=3.0).wake_at == 3.05


def test_nobody_waits():
    assert plan(StageGate(), (), at()) == GatePlan()


def test_bad_input_is_refused_by_name():
    for name, bad in (("max_hold_seconds", -1), ("max_hold_seconds", math.inf), ("min_share", 1), ("max_passed", 0)):
        with pytest.raises(ConfigError, match=name):
            StageGate(**{name: bad})
    with pytest.raises(ValueError, match="cost_seconds"):
        GateRequest("a", cost_seconds=math.nan)
    with pytest.raises(ValueError, match="own request_id"):
        plan(StageGate(), some("aa"), at())

"""The gate before a stage: what it releases, what it holds, and for how long."""

import pytest

from tests.support.gates import Asked, some, told
from vllm_omni_sched.graph.order import INTERACTIVE, WaitingRequest
from vllm_omni_sched.resource.pipeline.balance import RoundRobin
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_gate import (
    GateRequest,
    StageGate,
)


def at(replica_id=0, in_flight=0, limit=4, remaining=None, **more):
    work = float(in_flight) if remaining is None else remaining
    return ReplicaState(replica_id, work, in_flight=in_flight, limit=limit, **more)


def test_an_idle_replica_is_filled_at_once_and_up_to_its_limit():
    gate = Asked(waiting=some("abcde"))
    assert told(gate.plan(at(limit=3))) == [(name, 0, "idle") for name in "abc"]
    assert gate.held() == ["d", "e"]
    assert gate.plan(at(limit=0)).wake_at is None


def test_replicas_are_picked_by_cost_and_a_sick_one_never():
    waiting = [*some("l", place=-1, cost=5.0), *some("abc")]
    made = Asked(waiting=waiting).plan(at(0), at(1), at(2, healthy=False))
    assert told(made) == [("l", 0, "idle"), ("a", 1, "idle"), ("b", 1, "idle"), ("c", 1, "idle")]
    turns = Asked(StageGate(RoundRobin()), waiting).plan(at(0), at(1))
    assert [one.replica_id for one in turns.releases] == [0, 1, 0, 1]
    gate = Asked(waiting=some("a"))
    gate.plan(at(healthy=False))
    assert gate.held() == ["a"]


def test_a_cache_of_the_request_draws_it_and_a_distance_keeps_it_away():
    gate = Asked(waiting=some("ab"))
    gate.near["a"] = {1: 1.0}
    gate.far["b"] = {0: 5.0}
    assert told(gate.plan(at(0), at(1))) == [("a", 1, "idle"), ("b", 1, "idle")]


def test_a_cache_draws_a_request_by_what_it_saves_where_that_is_known():
    gate = Asked(waiting=some("abc"))
    gate.near = {name: {1: 1.0} for name in "abc"}
    gate.saved = {"a": {1: 0.1}, "b": {1: 0.9}}
    # a: 1 s there, 1.2 s here; b: 2 s and 0.4 s; c: 2 s, and 1.3 s + half of its cost
    assert [one.replica_id for one in gate.plan(at(0), at(1, remaining=0.3)).releases] == [0, 1, 1]


def test_where_all_are_busy_a_request_is_held_for_the_batch_until_its_window_ends():
    gate = Asked()
    gate.comes(*some("a"), now=10.0)
    made = gate.plan(at(in_flight=1), now=10.0)
    assert (told(made), gate.held(), made.wake_at) == ([], ["a"], 10.05)
    gate.comes(*some("b"), now=10.04)
    made = gate.plan(at(in_flight=1), now=10.04)
    assert (told(made), gate.held(), made.wake_at) == ([], ["a", "b"], 10.05)
    made = gate.plan(at(in_flight=1), now=10.05)
    assert told(made) == [("a", 0, "window_over"), ("b", 0, "window_over")]


def test_a_full_batch_goes_at_once_to_the_replica_it_fills():
    made = Asked(waiting=some("ab")).plan(at(0, in_flight=1), at(1, in_flight=2, remaining=9))
    assert told(made) == [("a", 1, "batch_full"), ("b", 1, "batch_full")]


def test_without_a_batching_window_nobody_is_held():
    made = Asked(StageGate(max_hold_seconds=0), some("a")).plan(at(in_flight=1))
    assert told(made) == [("a", 0, "window_over")]


def test_without_credits_it_waits_and_others_go():
    gate = Asked(waiting=[*some("a", needs="next"), *some("b")])
    gate.none_for.add("next")
    made = gate.plan(at())
    assert (told(made), gate.held(), made.wake_at) == ([("b", 0, "idle")], ["a"], None)
    gate.none_for.clear()
    assert told(gate.plan(at())) == [("a", 0, "idle")]


def test_the_low_class_has_its_share_and_no_more_while_others_wait():
    gate, went = Asked(StageGate(min_share=0.25, max_passed=1000)), []
    gate.comes(*some([f"l{k:02}" for k in range(20)], low=True, place=1))
    for number in range(40):
        gate.comes(*some([f"h{number:02}", f"i{number:02}"]))
        went += [one.request_id for one in gate.plan(at(limit=1)).releases]
    assert [name[0] for name in went[:8]] == list("hhhlhhhl")
    assert sum(name[0] == "l" for name in went) == 10


def test_without_a_share_the_low_class_waits_until_it_is_overdue():
    gate = Asked(StageGate(min_share=0, max_passed=3), some(["low"], low=True, place=1))
    went = []
    for number in range(5):
        gate.comes(*some([f"h{number}"]))
        went += told(gate.plan(at(limit=1)))
    assert [(name, why) for name, _, why in went[:4]] == [
        *((f"h{i}", "idle") for i in range(3)),
        ("low", "overdue"),
    ]


def test_one_that_is_overdue_and_has_no_credits_holds_back_all_others():
    gate = Asked(StageGate(max_passed=2), some("a", needs="next"))
    gate.none_for.add("next")
    gate.comes(*some("bcd"))
    assert [one[0] for one in told(gate.plan(at()))] == ["b", "c"]
    made = gate.plan(at())
    assert (told(made), gate.held(), made.wake_at) == ([], ["a", "d"], None)
    gate.none_for.clear()
    assert told(gate.plan(at())) == [("a", 0, "overdue"), ("d", 0, "idle")]


def test_nobody_who_waits_is_looked_at_without_room_and_few_with():
    gate = Asked(waiting=some([f"{i:04}" for i in range(2000)]))
    looks, first = [], gate.gate._firsts
    gate.gate._firsts = lambda lanes, units: (looks.append(len(lanes)), first(lanes, units))[1]
    gate.plan(at(in_flight=4), at(1, in_flight=9))
    assert looks == []
    assert len(gate.plan(at()).releases) == 4
    assert looks == [1] * 4, "one lane, once for each release"


def test_bad_input_is_refused_by_name():
    with pytest.raises(ValueError, match="units"):
        GateRequest(WaitingRequest("a", 0.0, INTERACTIVE), units=-1)

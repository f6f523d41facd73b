"""The gate before a stage: what it releases, what it holds, and for how long."""

import math
import random

import pytest

from tests.support.gates import Asked, some, told
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, Undated, WaitingOrder, WaitingRequest
from vllm_omni_sched.resource.pipeline.balance import RoundRobin
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_gate import (
    MOST_AHEAD,
    GatePlan,
    GateRequest,
    StageGate,
    ends_last_seconds,
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


def test_one_whose_credits_cannot_be_taken_after_all_keeps_its_place_and_its_likes_are_not_asked():
    gate = Asked(waiting=[*some("abc", needs="next"), *some("d")])
    gate.refused.add("a")
    assert told(gate.plan(at())) == [("d", 0, "idle")]
    assert gate.held() == ["a", "b", "c"]
    assert gate.asked == ["a", "d"]
    gate.refused.clear()
    assert [one[0] for one in told(gate.plan(at()))] == ["a", "b", "c"]


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


def test_one_that_changes_keeps_its_place_in_line_and_who_leaves_is_forgotten():
    gate = Asked(StageGate(max_passed=1))
    gate.comes(*some("ab", needs="next"), now=1.0)
    gate.none_for.add("next")
    gate.comes(*some("c"))
    gate.plan(at(limit=1))
    gate.comes(*some("a", needs="other", place=9))
    assert told(gate.plan(at(limit=1))) == [("a", 0, "overdue")]
    gate.gate.remove("b")
    gate.gate.remove("b")
    assert (len(gate.gate), "b" in gate.gate) == (0, False)
    gate.comes(*some("b"), now=3.0)
    assert gate.plan(at(in_flight=1), now=3.0).wake_at == 3.05


def test_one_that_was_released_and_comes_again_comes_last():
    gate = Asked(StageGate(max_passed=1, max_hold_seconds=0), some("abc"))
    assert told(gate.plan(at(limit=1))) == [("a", 0, "idle")]
    gate.comes(*some("a"))
    assert told(gate.plan(at(limit=1))) == [("a", 0, "idle")], "it is first to run"
    assert told(gate.plan(at(limit=2))) == [("b", 0, "overdue"), ("c", 0, "overdue")], "and came after these"


def test_short_work_that_is_held_behind_a_long_one_that_is_overdue_is_looked_at_again():
    busy = at(in_flight=1, units=400, units_limit=400)
    gate = Asked(StageGate(max_passed=1), some("l", units=100))
    gate.comes(*some("a"))
    assert [one[0] for one in told(gate.plan(busy, now=0.05))] == ["a"]
    gate.comes(*some("s"), now=5.0)
    made = gate.plan(busy, now=5.0)
    assert (told(made), made.wake_at, gate.held()) == ([], 5.05, ["l", "s"])
    assert told(gate.plan(busy, now=made.wake_at)) == [("s", 0, "window_over")]


def test_the_order_is_followed_as_it_changes_with_time():
    gate = Asked(StageGate(order=WaitingOrder(max_wait_seconds=5.0), max_hold_seconds=0))
    for name, priority in (("old", 1), ("new", 0)):
        gate.comes(GateRequest(WaitingRequest(name, 0.0 if name == "old" else 4.0, INTERACTIVE, priority=priority)))
    assert told(gate.plan(at(limit=1), now=4.5)) == [("new", 0, "idle")]
    gate.comes(GateRequest(WaitingRequest("newer", 4.0, INTERACTIVE)))
    assert told(gate.plan(at(limit=1), now=5.0)) == [("old", 0, "idle")]


# ---- the longest goes ahead where it would end last


def balanced(*waiting, max_wait_seconds=30.0, **more):
    order = WaitingOrder(max_wait_seconds, Undated.BALANCED)
    return Asked(StageGate(max_hold_seconds=0, order=order, **more), waiting)


def full(replica_id=1, remaining=1.0, **more):
    return at(replica_id, in_flight=1, limit=1, remaining=remaining, **more)


def first_of(gate, *replicas, now=0.0):
    name, _, reason = told(gate.plan(*replicas, now=now))[0]
    return name, reason


def long(arrival=9.0, **more):
    return GateRequest(WaitingRequest("l", arrival, BATCH, cost_seconds=4.0), **more)


def test_the_longest_goes_ahead_once_the_replicas_could_do_all_else_in_its_time():
    for remaining, expected in ((6.0, ("l", "longest")), (6.1, ("a", "idle"))):  # 2 replicas x 4 s = 2 s + 6 s
        assert first_of(balanced(*some("ab"), long()), at(limit=1), full(remaining=remaining)) == expected
    first = balanced(long(arrival=-1.0), *some("ab"))
    assert first_of(first, at(limit=1), full()) == ("l", "idle"), "it is first anyway"
    assert first_of(balanced(*some("ab", cost=4.0)), at(limit=1), full()) == ("a", "idle"), "no longer than the first"


def test_as_they_came_without_the_order_balanced():
    gate = Asked(StageGate(max_hold_seconds=0), [*some("ab"), long()])
    assert first_of(gate, at(limit=1), full()) == ("a", "idle")


def test_the_longest_goes_ahead_only_where_several_replicas_are_healthy_and_all_are_told():
    assert first_of(balanced(*some("ab"), long()), at(limit=1)) == ("a", "idle")
    assert first_of(balanced(*some("ab"), long()), at(limit=1), full(healthy=False)) == ("a", "idle")
    drawn = balanced(*some("ab"), long())
    plan = drawn.gate.release(0.0, [at(limit=1), full()], random.Random(0), drawn, most=1)
    assert told(plan) == [("a", 0, "idle")]


def test_what_runs_and_what_waits_decides_what_would_end_last_and_learnt_speeds_do_not():
    assert ends_last_seconds(6.0, [at(0), at(1)]) == pytest.approx(2.0)
    assert ends_last_seconds(4.0, [at(0), full(1, remaining=2.0)]) == pytest.approx(2.0)
    assert ends_last_seconds(6.0, [at(0, speed=2.0), at(1, speed=0.5)]) == pytest.approx(2.0)
    assert ends_last_seconds(6.0, [at(0), at(1, healthy=False)]) == math.inf


def test_the_longest_passes_no_deadline_no_better_priority_and_nobody_who_has_aged():
    dated = GateRequest(WaitingRequest("a", 0.0, INTERACTIVE, cost_seconds=0.1))
    assert first_of(balanced(dated, long()), at(limit=1), full()) == ("a", "idle")
    assert first_of(balanced(*some("a", place=-1), long()), at(limit=1), full()) == ("a", "idle")
    aged = balanced(*some("a"), long(), max_wait_seconds=10.0)
    assert first_of(aged, at(limit=1), full(), now=10.0) == ("a", "idle")


def test_the_longest_needs_room_and_credits_as_others_do():
    running = at(0, in_flight=1, limit=2, remaining=0.5, units=60, units_limit=100)
    assert first_of(balanced(*some("a"), long(units=80)), running, full()) == ("a", "window_over")
    fits = some("k", cost=3.0, units=40)
    gate = balanced(*some("a"), long(units=80), *some("m", cost=3.5, units=50), *fits)
    assert first_of(gate, running, full(remaining=0.0)) == ("a", "window_over"), "3 s is too short for the rest"
    gate = balanced(*some("a"), long(units=80), *fits)
    assert first_of(gate, running, full(remaining=0.5)) == ("k", "longest"), "the longest one that fits"
    gate = balanced(*some("ab"), long(needs="next"))
    gate.none_for.add("next")
    assert first_of(gate, at(limit=1), full()) == ("a", "idle")
    gate = balanced(*some("ab"), long(needs="next"))
    gate.refused.add("l")
    assert first_of(gate, at(limit=1), full()) == ("a", "idle")
    assert gate.asked == ["l", "a"]


def test_at_most_four_later_arrivals_pass_a_request_because_they_are_long():
    gate, went = balanced(*some("a")), []
    for number in range(MOST_AHEAD + 2):
        gate.comes(GateRequest(WaitingRequest(f"l{number}", 9.0 + number, BATCH, cost_seconds=4.0)))
        went.append(first_of(gate, at(limit=1), full(remaining=4.0)))
    assert went[: MOST_AHEAD + 1] == [*((f"l{n}", "longest") for n in range(MOST_AHEAD)), ("a", "idle")]
    assert went[-1] == ("l4", "idle")
    gate.comes(*some("b", cost=0.1))
    assert first_of(gate, at(limit=1), full(remaining=4.0)) == ("l5", "longest"), "nobody who waits was passed before"


def test_nobody_waits():
    assert Asked().plan(at()) == GatePlan()


def test_nobody_who_waits_is_looked_at_without_room_and_few_with():
    gate = Asked(waiting=some([f"{i:04}" for i in range(2000)]))
    looks, first = [], gate.gate._firsts
    gate.gate._firsts = lambda lanes, units: (looks.append(len(lanes)), first(lanes, units))[1]
    gate.plan(at(in_flight=4), at(1, in_flight=9))
    assert looks == []
    assert len(gate.plan(at()).releases) == 4
    assert looks == [1] * 4, "one lane, once for each release"


def test_bad_input_is_refused_by_name():
    for name, bad in (("max_hold_seconds", -1), ("max_hold_seconds", math.inf), ("min_share", 1), ("max_passed", 0)):
        with pytest.raises(ConfigError, match=name):
            StageGate(**{name: bad})
    with pytest.raises(ValueError, match="units"):
        GateRequest(WaitingRequest("a", 0.0, INTERACTIVE), units=-1)

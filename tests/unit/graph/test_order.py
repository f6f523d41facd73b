"""The waiting order: its rules as a table, its promises as properties, and the queue that keeps it up to date."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.order import (
    BATCH,
    DEFAULT_CLASSES,
    INTERACTIVE,
    REALTIME,
    PlaceReason,
    SlaClass,
    WaitingOrder,
    WaitingRequest,
)
from vllm_omni_sched.graph.waiting_queue import WaitingQueue

SLOW = SlaClass("slow", ttft_seconds=10.0, itl_seconds=1.0, rank=1)


def request(name, arrival=0.0, sla=SLOW, cost=0.0, share="", priority=0, holds_memory=False):
    affinity = frozenset(share)
    return WaitingRequest(name, arrival, sla, cost, affinity=affinity, priority=priority, holds_memory=holds_memory)


def ids(placed):
    return "".join(one.request.request_id for one in placed)


def reasons(placed):
    return {one.request.request_id: one.reason.value for one in placed}


@pytest.mark.parametrize(
    ("waiting", "now", "order", "why"),
    [
        # rule 1: who holds memory, among them by the other rules
        (
            [
                request("a", 0, BATCH),
                *(request(n, 99, sla, holds_memory=True) for n, sla in (("b", BATCH), ("c", SLOW))),
            ],
            100,
            "cba",
            {"a": "aged", "b": "holds_memory", "c": "holds_memory"},
        ),
        # rule 2: aged first, by arrival, whatever their class
        (
            [request("a", 1, BATCH), request("b", 0, BATCH), request("c", 99.9, REALTIME)],
            100,
            "bac",
            {"a": "aged", "b": "aged", "c": "realtime"},
        ),
        # rule 2: by rank
        (
            [request("a", 0, BATCH), request("b", 0, INTERACTIVE), request("c", 0, REALTIME)],
            0,
            "cba",
            {"a": "arrival", "b": "deadline", "c": "realtime"},
        ),
        # rule 3: least slack first: the later arrival costs more
        ([request("a", 0, cost=1), request("b", 1, cost=5)], 1, "ba", {"a": "deadline", "b": "deadline"}),
        # rule 3: user priority, in its class only
        ([request("a"), request("b", 1, priority=-1)], 1, "ba", {"a": "deadline", "b": "priority"}),
        ([request("a", sla=BATCH, priority=-9), request("b", 1)], 1, "ba", {"a": "priority", "b": "deadline"}),
        ([request("b", 1, BATCH), request("a", 0, BATCH)], 1, "ab", {"a": "arrival", "b": "arrival"}),
        # rule 4: what is lost gives way in its class, not to other classes
        ([request("a", 0), request("b", 5)], 11, "ba", {"a": "late", "b": "deadline"}),
        ([request("a", 0), request("b", 5, BATCH)], 11, "ab", {"a": "late", "b": "arrival"}),
        ([request("a", 0, cost=1), request("b", 5)], 9, "ab", {"a": "deadline", "b": "deadline"}),  # slack 0 is in time
        # ties
        ([request("b"), request("a")], 0, "ab", {"a": "deadline", "b": "deadline"}),
    ],
)
def test_rules(waiting, now, order, why):
    placed = WaitingOrder(max_wait_seconds=30).plan(waiting, now)
    assert ids(placed) == order
    assert reasons(placed) == why


@pytest.mark.parametrize(
    ("waiting", "order", "pulled"),
    [
        # c joins a: b has 8 s to spare
        ([request("a", 0, share="x"), request("b", 1), request("c", 2, cost=1, share="x")], "acb", "c"),
        # b has 1.5 s to spare: enough for 1 s, not for 2
        ([request("a", -7, share="x"), request("b", -6.5), request("c", 2, cost=1, share="x")], "acb", "c"),
        ([request("a", -7, share="x"), request("b", -6.5), request("c", 2, cost=2, share="x")], "abc", ""),
        # two together would cost it, one does not
        (
            [request("a", -7, share="x"), request("b", -6.5), *(request(n, 2, cost=1, share="x") for n in "cd")],
            "acbd",
            "c",
        ),
        # what stands next to it already was not moved
        ([request("a", 0, share="x"), request("b", 1, share="x")], "ab", ""),
        # never past another class, nor past an aged one
        ([request("a", 0, share="x"), request("b", 1), request("c", 2, BATCH, share="x")], "abc", ""),
        ([request("a", -31, share="x"), request("b", -30), request("c", 2, share="x")], "abc", ""),
        (
            [request("a", share="x", holds_memory=True), request("b", 1, holds_memory=True), request("c", share="x")],
            "abc",
            "",
        ),
        # two keys, two groups
        ([request(n, i, BATCH, share=k) for i, (n, k) in enumerate(zip("abcd", "xyxy", strict=True))], "acbd", "c"),
    ],
)
def test_affinity(waiting, order, pulled):
    placed = WaitingOrder(max_wait_seconds=30).plan(waiting, 2)
    assert ids(placed) == order
    assert "".join(n for n, why in reasons(placed).items() if why == "affinity") == pulled


@pytest.mark.parametrize(("due", "order"), [(4.0, "acb"), (2.5, "abc"), (1.0, "abc")])
def test_affinity_pulls_nobody_past_one_who_would_start_after_it_is_due(due, order):
    """Its deadline, at 10, is far; but the slack until then is for the stages that come after, too."""
    waiting = [
        replace(request("a", share="x"), due=0.5),
        replace(request("b"), due=due),
        replace(request("c", cost=1, share="x"), due=5.0),
    ]
    assert ids(WaitingOrder(max_wait_seconds=30).plan(waiting, 2)) == order


requests = st.builds(
    lambda arrival, sla, cost, priority, share: (arrival, sla, cost, priority, share),
    st.integers(0, 40),
    st.sampled_from([*DEFAULT_CLASSES, SLOW]),
    st.integers(0, 4),
    st.integers(-1, 1),
    st.frozensets(st.sampled_from("xyz"), max_size=2),
)


def numbered(drawn, affinity=True):
    return [
        WaitingRequest(f"r{i:03}", float(a), sla, float(c), affinity=share if affinity else frozenset(), priority=p)
        for i, (a, sla, c, p, share) in enumerate(drawn)
    ]


def met(placed, now):
    """Who starts in time if they are served one by one."""
    start, result = now, set()
    for one in placed:
        if start <= one.request.latest_start:
            result.add(one.request.request_id)
        start += one.request.cost_seconds
    return result


@settings(deadline=None)
@given(st.lists(requests, max_size=25), st.integers(0, 60))
def test_affinity_loses_nobody_and_costs_nobody_a_deadline(drawn, now):
    order = WaitingOrder(max_wait_seconds=30)
    waiting = numbered(drawn)
    placed = order.plan(waiting, now)
    alone = order.plan([replace(r, affinity=frozenset()) for r in waiting], now)
    assert sorted(r.request.request_id for r in placed) == sorted(r.request_id for r in waiting)
    assert met(placed, now) >= met(alone, now)
    aged = [one.request.request_id for one in alone if one.reason is PlaceReason.AGED]
    assert [one.request.request_id for one in placed[: len(aged)]] == aged


@settings(deadline=None)
@given(st.lists(st.lists(requests, max_size=4), min_size=1, max_size=25), st.integers(1, 3))
def test_whoever_has_aged_is_admitted_within_the_stated_number_of_steps(steps, admitted_per_step):
    """Rule 1's bound holds for any stream of arrivals, with one step per second."""
    order = WaitingOrder(max_wait_seconds=3)
    waiting, bound, number, now = [], {}, 0, 0
    while waiting or now < len(steps):
        for _, sla, cost, priority, share in steps[now] if now < len(steps) else []:
            waiting.append(WaitingRequest(f"r{number:03}", now, sla, cost, affinity=share, priority=priority))
            number += 1
        for one in waiting:
            if now - one.arrival >= 3 and one.request_id not in bound:
                earlier = sum((o.arrival, o.request_id) < (one.arrival, one.request_id) for o in waiting)
                bound[one.request_id] = now + earlier // admitted_per_step
        for placed in order.plan(waiting, now)[:admitted_per_step]:
            waiting.remove(placed.request)
            assert now <= bound.get(placed.request.request_id, math.inf)
        assert all(now < bound.get(one.request_id, math.inf) for one in waiting)
        now += 1


@settings(deadline=None)
@given(st.lists(st.one_of(requests, st.sampled_from(["pop", "remove", "tick", "leap"])), max_size=60))
def test_the_queue_agrees_with_the_plan(operations):
    order = WaitingOrder(max_wait_seconds=7)
    queue, waiting, now, number = WaitingQueue(order), [], 0.0, 0
    for operation in operations:
        if operation == "tick":
            now += 0.5
        elif operation == "leap":
            now += 6
        elif operation == "remove" and waiting:
            gone = waiting.pop(number % len(waiting))
            assert queue.remove(gone.request_id) == gone
        elif isinstance(operation, tuple):
            arrival, sla, cost, priority, _ = operation
            new = WaitingRequest(f"r{number}", now - arrival / 4, sla, cost, priority=priority)
            number += 1
            waiting.append(new)
            queue.push(new, now)
        plan = order.plan(waiting, now)
        assert queue.peek(now) == (plan[0] if plan else None)
        if operation == "pop":
            assert queue.pop(now) == (plan[0] if plan else None)
            waiting = [r for r in waiting if r is not (plan[0].request if plan else None)]
        assert len(queue) == len(waiting)
    assert [queue.pop(now) for _ in range(len(waiting))] == list(order.plan(waiting, now))
    assert queue.pop(now) is None


def test_ten_thousand_waiting_cost_few_comparisons_each():
    """Count, not time: the key of a request is computed when it is pushed and at most twice more."""

    class Counting(WaitingOrder):
        keys = 0

        def key(self, request, now):
            self.keys += 1
            return super().key(request, now)

    order = Counting(max_wait_seconds=30)
    queue = WaitingQueue(order)
    for i in range(10_000):
        queue.push(request(f"r{i}", i / 1000, DEFAULT_CLASSES[i % 3]), i / 1000)
    for i in range(10_000):
        queue.push(request(f"s{i}", 10 + i / 200), 10 + i / 200)
        queue.pop(10 + i / 200)
    assert order.keys <= 3 * 20_000

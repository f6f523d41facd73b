"""The order `balanced` bounds how long anybody waits for others, and shortens the makespan."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.order import BATCH, Undated, WaitingOrder, WaitingRequest
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_gate import MOST_AHEAD, GateRequest, ReleaseReason, StageGate

costs = st.integers(1, 60).map(float) | st.sampled_from([1.0, 1.0, 100.0, 1000.0])


@dataclass
class Seen:
    """Holds what happened to one request. ``ahead``: seconds of work that were there when it came."""

    came: float
    ahead: float
    start: float = math.nan
    passed_by: list[float] = field(default_factory=list)  # costs of later arrivals that started before it


def served(arrivals: list[tuple[float, float]], replicas: int) -> tuple[list[Seen], float]:
    """Return what happened to requests of (time, cost), and when the last one ends; replicas run one at a time."""
    order = WaitingOrder(max_wait_seconds=math.inf, undated=Undated.BALANCED)
    gate, rng = StageGate(max_hold_seconds=0.0, max_passed=10**9, order=order), random.Random(0)
    seen: list[Seen] = []
    ends, now = [0.0] * replicas, 0.0
    while len(seen) < len(arrivals) or len(gate):
        while len(seen) < len(arrivals) and arrivals[len(seen)][0] <= now:
            number, cost = len(seen), arrivals[len(seen)][1]
            waiting = sum(arrivals[one][1] for one in range(number) if f"{one:02}" in gate)
            seen.append(Seen(now, waiting + sum(max(end - now, 0.0) for end in ends)))
            gate.put(GateRequest(WaitingRequest(f"{number:02}", now, BATCH, cost)), now)
        states = [ReplicaState(one, max(end - now, 0.0), int(end > now), limit=1) for one, end in enumerate(ends)]
        for release in gate.release(now, states, rng).releases:
            number = int(release.request_id)
            cost = arrivals[number][1]
            seen[number].start, ends[release.replica_id] = now, now + cost
            earlier = [one for one in seen[:number] if math.isnan(one.start)]
            assert not earlier or release.reason is ReleaseReason.LONGEST, "only the longest goes ahead"
            for one in earlier:
                one.passed_by.append(cost)
        later = [end for end in ends if end > now] + [at for at, _ in arrivals[len(seen) :]]
        now = min(later, default=now)
    return seen, max(ends)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 5, 40]), costs), min_size=1, max_size=40), st.integers(1, 4))
def test_a_request_waits_for_the_work_before_it_and_for_few_others(drawn, replicas):
    at, arrivals = 0.0, []
    for gap, cost in drawn:
        at += gap
        arrivals.append((at, cost))
    seen, _ = served(arrivals, replicas)
    for one in seen:
        assert not math.isnan(one.start), "all have started"
        assert len(one.passed_by) <= (MOST_AHEAD if replicas > 1 else 0)
        assert one.start - one.came <= (one.ahead + sum(one.passed_by)) / replicas + 1e-6


@settings(deadline=None, max_examples=200)
@given(
    others=st.lists(st.integers(1, 20).map(float), min_size=1, max_size=40),
    longer=st.integers(1, 300),
    place=st.integers(0, 40),
    replicas=st.integers(2, 4),
)
def test_one_long_request_is_not_left_to_the_end(others, longer, place, replicas):
    """By arrival it could end as much as its own cost after the others; so it ends at most one other request later."""
    long = max(others) + longer
    in_order = [*others[:place], long, *others[place:]]
    _, makespan = served([(0.0, cost) for cost in in_order], replicas)
    assert makespan <= max(sum(in_order) / replicas, long) + max(others) + 1e-6


def test_no_stream_of_long_requests_starves_a_short_one():
    """A long request that comes whenever a place is free does not starve the others."""
    arrivals = [(0.0, 100.0), (50.0, 100.0), (60.0, 1.0), *((100.0 + 50 * k, 100.0) for k in range(20))]
    seen, _ = served(sorted(arrivals), replicas=2)
    assert len(seen[2].passed_by) == MOST_AHEAD
    assert seen[2].start == 100.0 + 50 * MOST_AHEAD

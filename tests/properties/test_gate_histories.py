"""The gate that is told what changes, decision by decision beside one that looks at all who wait."""

from __future__ import annotations

import math
import random
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.plain_gate import PlainGate
from vllm_omni_sched.graph.order import BATCH, DEFAULT_CLASSES, Undated, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.waiting_queue import WaitingQueue
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_gate import GateRequest, GateTerms, StageGate


class Terms(GateTerms):
    """Credits that run out, and some that cannot be taken though they seem to be there."""

    def __init__(self, free, refused, near):
        self.free, self.refused, self.near = dict(free), refused, near
        self.needs = {}
        self.asked = []

    def has_credits(self, needs):
        return self.free.get(needs, 1) > 0

    def take(self, request_id):
        self.asked.append(request_id)
        if request_id in self.refused:
            return False
        self.free[self.needs[request_id]] -= 1
        return True

    def warm(self, request_id):
        return self.near.get(request_id, {})

    def saved_seconds(self, request_id):
        return self.near.get(request_id, {}) if request_id.endswith(("0", "2")) else None


def drawn_request(rng, name, now, long, undated=False):
    """A request; if ``undated``, most have no deadline."""
    sla = rng.choice(DEFAULT_CLASSES)
    if undated and rng.random() < 0.8:
        cost, priority = rng.choice([0.0, 0.1, 1.0, 4.0, 9.0]), rng.choice([0, 0, 0, 0, 1])
        waiting = WaitingRequest(name, now - rng.choice([0.0, 0.5]), BATCH, cost_seconds=cost, priority=priority)
        return GateRequest(waiting, rng.random() < 0.5, rng.choice([0, 0, 50, 1000]) if long else 0, rng.choice("abc"))
    waiting = WaitingRequest(
        name,
        now - rng.choice([0.0, 0.0, 0.5, 3.0]),
        sla,
        cost_seconds=rng.choice([0.01, 0.1, 1.0]),
        priority=rng.choice([0, 0, 0, -1]),
        due=now + rng.choice([0.1, math.inf]),
    )
    units = int(rng.paretovariate(0.4)) % 4096 if long and rng.random() < 0.4 else 0
    return GateRequest(waiting, sla.rank == 2, units, rng.choice("abc"))


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    hold=st.sampled_from([0.0, 0.05]),
    min_share=st.sampled_from([0.0, 0.1, 0.5]),
    max_passed=st.sampled_from([1, 2, 5, 64]),
    undated=st.sampled_from(Undated),
    long=st.booleans(),
    scarce=st.booleans(),
)
@example(1554, 0.0, 0.0, 5, Undated.ARRIVAL, True, True)  # a key changed while another question was answered
def test_it_decides_as_one_that_looks_at_all(seed, hold, min_share, max_passed, undated, long, scarce):
    rng, now = random.Random(seed), 10.0
    balanced = undated is Undated.BALANCED
    order = WaitingOrder(max_wait_seconds=2.0, undated=undated)
    gate = StageGate(None, hold, min_share, max_passed, order)
    plain = PlainGate(order, hold, min_share, max_passed)
    waiting = {}
    for step in range(40):
        now += rng.choice([0.0, 0.001, 0.03, 0.4])
        for number in range(rng.choice([0, 1, 4]) if step < 30 else 0):
            one = drawn_request(rng, f"{step}.{number}", now, long, balanced)
            waiting[one.request_id] = one
            for each in (gate, plain):
                each.put(one, now)
        for name in rng.sample(sorted(waiting), min(len(waiting), rng.choice([0, 0, 1, 3]))):
            changed = rng.random() < 0.5
            if changed:
                waiting[name] = replace(drawn_request(rng, name, now, long, balanced), needs=rng.choice("abc"))
            else:
                del waiting[name]
            for each in (gate, plain):
                if changed:
                    each.put(waiting[name], now)
                else:
                    each.remove(name)
        replicas = [
            ReplicaState(
                i,
                rng.choice([0.0, 1.0, 2.5]),
                in_flight=(running := rng.choice([0, 0, 1, 2, 3])),
                limit=rng.randint(1, 4),
                speed=rng.choice([0.5, 1.0, 1.0]) if balanced else 1.0,
                healthy=rng.random() < 0.9,
                units=rng.choice([0, 10, 100, 1000]) if running else 0,
                units_limit=rng.choice([None, 64, 2000]),
            )
            for i in range(rng.randint(0, 3))
        ]
        free = {needs: rng.choice([0, 1, 2, 9]) if scarce else 99 for needs in "abc"}
        refused = {name for name in waiting if scarce and rng.random() < 0.1}
        near = {name: {0: rng.random()} for name in waiting if rng.random() < 0.3}
        plans, asked = [], []
        for each in (gate, plain):
            terms = Terms(free, refused, near)
            terms.needs = {name: one.needs for name, one in waiting.items()}
            plans.append(each.release(now, replicas, rng, terms))
            asked.append(terms.asked)
        assert plans[0] == plans[1]
        assert asked[0] == asked[1]
        for one in plans[0].releases:
            del waiting[one.request_id]
        assert len(gate) == len(waiting) == len(plain.requests)
        assert all(name in gate for name in waiting)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_alike_requests_go_as_the_waiting_queue_has_them_affinity_included(seed):
    rng, now = random.Random(seed), 0.0
    order = WaitingOrder(max_wait_seconds=3.0)
    gate, queue = StageGate(None, 0.0, 0.0, 10**6, order), WaitingQueue(order)
    one_place = [ReplicaState(0, limit=1)]
    for step in range(60):
        now += rng.choice([0.0, 0.1, 0.5])
        for number in range(rng.choice([0, 2])):
            shared = frozenset(rng.choice("xyz")) if rng.random() < 0.7 else frozenset()
            one = WaitingRequest(f"{step}.{number}", now, rng.choice(DEFAULT_CLASSES), 0.1, affinity=shared)
            gate.put(GateRequest(one), now)
            queue.push(one, now)
        if len(queue) > 1:  # a lane that runs empty forgets who went last
            expected = queue.pop(now).request.request_id
            assert [one.request_id for one in gate.release(now, one_place, rng).releases] == [expected]

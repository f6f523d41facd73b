"""The gate under random load: nothing lost or doubled, no replica overfull, nobody passed over too often."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.gates import Asked, some
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_gate import GateRequest, StageGate


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 12), st.sampled_from([0, 0.1, 0.5]), st.booleans())
def test_random_load(seed, num_replicas, max_passed, min_share, flow):
    """Random requests and replicas keep the invariants. ``flow``: credits come and go; else all have them."""
    rng = random.Random(seed)
    asked = Asked(StageGate(max_hold_seconds=0.05, min_share=min_share, max_passed=max_passed))
    replicas = [ReplicaState(i, limit=rng.randint(1, 4)) for i in range(num_replicas)]
    came: dict[str, int] = {}  # numbers in order of arrival; of one snapshot, in its order
    waiting: dict[str, GateRequest] = {}
    passed: dict[str, int] = {}
    running: list[int] = []
    released: set[str] = set()
    now = 0.0
    for step in range(60):
        if step < 40:
            for number in range(rng.randint(0, 4)):
                name = f"{step}.{number}"
                kind = {"low": rng.random() < 0.5, "needs": name}
                # newest first, the order that is worst for the old
                place = (1000 if kind["low"] else 0) - step
                (waiting[name],) = some([name], place, rng.paretovariate(1.5), **kind)
                asked.comes(waiting[name], now=now)
                passed[name] = 0
                came[name] = len(came)
        asked.none_for = {name for name in waiting if flow and rng.random() < 0.3}
        idle = {one.replica_id for one in replicas if one.in_flight == 0}
        made = asked.plan(*replicas, now=now)

        held = set(asked.held())
        assert {one.request_id for one in made.releases} | held == waiting.keys()
        assert len(made.releases) + len(held) == len(waiting)
        for one in made.releases:
            assert one.request_id not in released
            released.add(one.request_id)
            assert waiting.pop(one.request_id).request_id not in asked.none_for
            place = replicas[one.replica_id]
            assert place.room > 0
            replicas[one.replica_id] = place._replace(in_flight=place.in_flight + 1)
            running.append(one.replica_id)
            for other in waiting:  # those released later in this plan were passed over, too
                passed[other] += came[other] < came[one.request_id]
        oldest = min(held, key=came.__getitem__, default="")
        behind = passed.get(oldest) == max_passed and oldest in asked.none_for  # nobody goes before it any more
        if held - asked.none_for and any(one.room for one in replicas) and not behind:
            assert made.wake_at is not None
            assert now < made.wake_at <= now + 0.05
            assert not any(replicas[i].room for i in idle)
        else:
            assert made.wake_at is None
        assert max(passed.values(), default=0) <= max_passed

        now += rng.choice([0.001, 0.02, 0.1])
        rng.shuffle(running)
        for _ in range(rng.randint(0, len(running))):
            done = running.pop()
            replicas[done] = replicas[done]._replace(in_flight=replicas[done].in_flight - 1)
    asked.none_for = set()
    for _ in range(len(waiting) + 1):  # with credits and idle replicas all that is left goes
        idle_now = [one._replace(in_flight=0) for one in replicas]
        for one in asked.plan(*idle_now, now=now).releases:
            del waiting[one.request_id]
    assert not waiting


@settings(deadline=None, max_examples=50)
@given(st.sampled_from([0.05, 0.1, 0.3, 0.5]), st.integers(1, 4))
def test_while_both_classes_wait_the_low_one_has_its_share(min_share, limit):
    gate, number, lows = StageGate(min_share=min_share, max_passed=10**9), 0, 0
    names = iter(range(10**6))

    def more(count, low):
        for _ in range(count):
            gate.put(*some([f"{'l' if low else 'h'}{next(names)}"], place=int(low), low=low), 0.0)

    more(8, low=False)
    more(8, low=True)
    for _ in range(100):
        made = gate.release(0.0, [ReplicaState(0, limit=limit)], random.Random(0))
        gone = [one.request_id for one in made.releases]
        number += len(gone)
        low = sum(name.startswith("l") for name in gone)
        lows += low
        more(low, low=True)
        more(len(gone) - low, low=False)
    assert abs(lows - min_share * number) <= 2

"""Which replicas have room: drawn, and not looked for."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.resource.pipeline.balance import CHOICES, ReplicaIndex, drawn
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState

CHANGES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(1, 4)), max_size=60)


@given(CHANGES, st.integers(0, 1000))
def test_idle_ones_come_first_and_each_replica_is_in_one_group(changes: list[tuple[int, int, int]], seed: int) -> None:
    index, known = ReplicaIndex(), dict[int, tuple[int, int]]()
    for replica_id, in_flight, limit in changes:
        index.put(replica_id, in_flight, limit)
        known[replica_id] = in_flight, limit
    rng = random.Random(seed)
    idle = {one for one, (in_flight, _) in known.items() if not in_flight}
    room = {one for one, (in_flight, limit) in known.items() if 0 < in_flight < limit}
    found = list(index.with_room(rng))
    assert set(found[: len(idle)]) == idle
    assert set(found[len(idle) :]) == room
    assert len(found) == len(idle | room)
    assert sorted(index.full(rng)) == sorted(known.keys() - idle - room)
    assert len(index) == len(known)


def test_one_that_is_gone_is_not_drawn() -> None:
    index = ReplicaIndex()
    for replica_id in range(3):
        index.put(replica_id, 0, 1)
    index.remove(1)
    index.remove(7)  # never known
    assert sorted(index.with_room(random.Random(1))) == [0, 2]
    assert 1 not in index


def test_of_those_that_get_nothing_others_are_drawn() -> None:
    index, looked = ReplicaIndex(), list[int]()
    for replica_id in range(100):
        index.put(replica_id, replica_id % 2, 1)

    def describe(replica_id: int) -> ReplicaState | None:
        looked.append(replica_id)
        return None if replica_id % 4 == 0 else ReplicaState(replica_id, in_flight=replica_id % 2, limit=1)

    found = drawn(index, describe, random.Random(2))
    assert [one.replica_id % 4 for one in found] == [2] * CHOICES
    assert len(looked) < 30

    for replica_id in range(0, 100, 2):
        index.put(replica_id, 1, 1)
    full = drawn(index, lambda one: ReplicaState(one, in_flight=1, limit=1), random.Random(2), even_full=True)
    assert len(full) == CHOICES
    assert drawn(index, lambda one: ReplicaState(one, in_flight=1, limit=1), random.Random(2)) == []


def test_a_few_are_drawn_without_a_look_at_the_others() -> None:
    class Counted(random.Random):
        asked = 0

        def random(self) -> float:
            self.asked += 1
            return super().random()

    index, rng = ReplicaIndex(), Counted(1)
    for replica_id in range(10_000):
        index.put(replica_id, 1, 2)
    found = index.with_room(rng)
    assert len({next(found) for _ in range(4)}) == 4
    assert rng.asked == 4

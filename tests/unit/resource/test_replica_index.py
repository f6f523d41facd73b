"""Which replicas have room: drawn, and not looked for."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.resource.replica_index import ReplicaIndex

CHANGES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(1, 4)), max_size=60)


@given(CHANGES, st.integers(0, 1000))
def test_idle_ones_come_first_and_each_replica_is_in_one_group(changes: list[tuple[int, int, int]], seed: int) -> None:
    index, known = ReplicaIndex(), dict[int, tuple[int, int]]()
    for replica_id, in_flight, limit in changes:
        index.put(replica_id, in_flight, limit)
        known[replica_id] = in_flight, limit
    dice = random.Random(seed)
    idle = {one for one, (in_flight, _) in known.items() if not in_flight}
    room = {one for one, (in_flight, limit) in known.items() if 0 < in_flight < limit}
    drawn = list(index.with_room(dice))
    assert set(drawn[: len(idle)]) == idle
    assert set(drawn[len(idle) :]) == room
    assert len(drawn) == len(idle | room)
    assert sorted(index.full(dice)) == sorted(known.keys() - idle - room)
    assert len(index) == len(known)


def test_a_few_are_drawn_without_a_look_at_the_others() -> None:
    class Counted(random.Random):
        asked = 0

        def random(self) -> float:
            self.asked += 1
            return super().random()

    index, dice = ReplicaIndex(), Counted(1)
    for replica_id in range(10_000):
        index.put(replica_id, 1, 2)
    drawn = index.with_room(dice)
    assert len({next(drawn) for _ in range(4)}) == 4
    assert dice.asked == 4

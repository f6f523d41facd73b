"""An arena under any workload, against a model: nothing is lost, nothing got twice, and all room comes back."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.arena import KIB, FakeClock, place, small
from vllm_omni_sched.config.errors import NoRoomError
from vllm_omni_sched.connectors.arena import ArenaTransport
from vllm_omni_sched.connectors.arena.outbox import ALIVE_FOR
from vllm_omni_sched.connectors.arena.transport import BURY_EVERY
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message

EDGES = [Edge("0", "1"), Edge("1", "2")]
KEYS = ["a", "b", "c", "d/e", ""]
TTL = 60.0
SIZES = [0, 10, 900, 3000, 5000, 70_000, 300_000]
Name = tuple[Edge, str]


class World:
    """Two processes' paths, each of which sends and receives, and what they ought to hold."""

    def __init__(self, **options: Any) -> None:
        self.clock, self.place = FakeClock(), place()
        self.root = self.place.__enter__()
        pool = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": 512 * KIB, "inline_bytes": 1 * KIB}
        settings = {"image": pool, "max_messages": 64, "ttl_seconds": TTL, **options}
        self.paths = [ArenaTransport(small(self.root, **settings), clock=self.clock) for _ in range(2)]
        self.waiting: dict[tuple[int, Name], tuple[int, float]] = {}  # by sender: number, and when it was put
        self.held: list[tuple[int, Any]] = []
        self.counts = [Counter[str](), Counter[str]()]
        self.number = 0

    def put(self, sender: int, name: Name, nbytes: int) -> None:
        self.number += 1
        payload = {"n": self.number, "x": np.full((1, nbytes), self.number % 251, np.uint8)}
        self.expire(sender, certain=False)
        try:
            self.paths[sender].put(make_message(*name, payload))
        except NoRoomError:
            self.counts[sender]["refused"] += 1
            return
        self.waiting[sender, name] = self.number, self.clock()

    def get(self, receiver: int, name: Name, hold: bool) -> None:
        arrival = self.paths[receiver].get(*name)
        numbers = [self.waiting[sender, name][0] for sender in (0, 1) if (sender, name) in self.waiting]
        if arrival is None:
            # what is late may have gone
            assert all(self.clock() - self.waiting[s, name][1] > TTL for s in (0, 1) if (s, name) in self.waiting)
            return
        found = arrival.open()
        assert found["n"] in numbers  # never an old one, and none twice
        del self.waiting[next(s for s in (0, 1) if self.waiting.get((s, name), (0, 0))[0] == found["n"]), name]
        assert (found["x"] == found["n"] % 251).all()
        if hold:
            self.held.append((found["n"] % 251, found["x"]))

    def expire(self, sender: int, certain: bool = True) -> None:
        if certain:
            self.paths[sender].reap()
            for key in [k for k, (_, at) in self.waiting.items() if k[0] == sender and self.clock() - at > TTL]:
                del self.waiting[key]

    def check(self) -> None:
        for number, view in self.held:
            assert (view == number).all()
        for sender in (0, 1):
            self.expire(sender)
            facts = self.paths[sender].health().facts
            if "put" in facts:
                gone = sum(facts[name] for name in ("consumed", "replaced", "discarded", "expired"))
                assert facts["put"] == gone + facts["in_flight"]
                assert facts["damaged"] == facts["given_back"] == 0
                assert facts["refused"] == self.counts[sender]["refused"]
                outbox = self.paths[sender]._outbox
                assert outbox is not None
                waiting = sum(sender == s for s, _ in self.waiting)
                assert sum(outbox.counts.waiting.values()) == waiting
                assert facts["in_flight"] >= waiting

    def end(self) -> None:
        """All that waits can be got, and then all room is there again."""
        for _, name in sorted(self.waiting, key=str):
            self.get(0, name, hold=False)
        assert all(self.clock() - at > TTL for _, at in self.waiting.values())
        self.waiting.clear()
        self.held.clear()
        for path in self.paths:
            path.reap()
            facts = path.health().facts
            if "put" in facts:
                assert facts["in_flight"] == facts["ring"]["used_bytes"] == 0
                assert all(pool["used_bytes"] == pool["fragmentation"] == 0 for pool in facts["pools"].values())
                outbox = path._outbox
                assert outbox is not None
                assert sum(map(len, outbox._free)) == outbox.layout.slots
                assert not any((outbox._by_key, outbox._by_name, outbox._unwanted, any(outbox._got)))
                assert set(outbox.counts.waiting.values()) | set(outbox.counts.waiting_bytes.values()) <= {0}
            path.close()
        self.place.__exit__(None, None, None)


ends, names = st.integers(0, 1), st.tuples(st.sampled_from(EDGES), st.sampled_from(KEYS))


class ArenaMachine(RuleBasedStateMachine):
    world: World | None = None

    @initialize(copy_out=st.booleans())
    def begin(self, copy_out: bool) -> None:
        self.world = World(copy_out=copy_out)

    @rule(sender=ends, name=names, nbytes=st.sampled_from(SIZES))
    def put(self, sender: int, name: Name, nbytes: int) -> None:
        assert self.world is not None
        self.world.put(sender, name, nbytes)

    @rule(receiver=ends, name=names, hold=st.booleans())
    def get(self, receiver: int, name: Name, hold: bool) -> None:
        assert self.world is not None
        self.world.get(receiver, name, hold)

    @rule(sender=ends, key=st.sampled_from(KEYS))
    def discard(self, sender: int, key: str) -> None:
        assert self.world is not None
        late = [k for k in self.world.waiting if k[0] == sender and k[1][1] == key]
        self.world.expire(sender)
        kept = [k for k in late if k in self.world.waiting]
        assert self.world.paths[sender].discard(key) == len(kept)
        for name in kept:
            del self.world.waiting[name]

    @precondition(lambda self: self.world is not None and self.world.held)
    @rule(which=st.integers(0, 100))
    def drop(self, which: int) -> None:
        assert self.world is not None
        del self.world.held[which % len(self.world.held)]

    @rule(seconds=st.sampled_from([0.01, ALIVE_FOR, BURY_EVERY, TTL / 2, TTL + 1]))
    def wait(self, seconds: float) -> None:
        assert self.world is not None
        self.world.clock.now += seconds

    @invariant()
    def holds(self) -> None:
        if self.world is not None:
            self.world.check()

    def teardown(self) -> None:
        if self.world is not None:
            self.world.end()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("seed", range(4))
def test_long_random_workloads(seed: int) -> None:
    """1,000 steps each, most of the time with more to send than there is room for."""
    rng, world = random.Random(seed), World()
    for step in range(1000):
        name = rng.choice(EDGES), f"{rng.choice(KEYS)}{rng.randrange(20)}"
        match rng.choices(["put", "get", "drop", "discard", "wait"], [40, 40, 30, 5, 5])[0]:
            case "put":
                world.put(rng.randrange(2), name, rng.choice(SIZES))
            case "get":
                world.get(rng.randrange(2), name, hold=rng.random() < 0.5)
            case "drop" if world.held:
                del world.held[rng.randrange(len(world.held))]
            case "discard":
                sender = rng.randrange(2)
                world.expire(sender)
                found = [k for k in world.waiting if k[0] == sender and k[1][1] == name[1]]
                assert world.paths[sender].discard(name[1]) == len(found)
                for key in found:
                    del world.waiting[key]
            case "wait":
                world.clock.now += rng.choice([0.01, 1.0, 20.0])
        if step % 20 == 0:
            world.check()
    assert all(counts["refused"] for counts in world.counts)
    world.end()

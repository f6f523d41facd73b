"""Tiers under any workload, against a model: each message is in one tier, is got once, and none is lost."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.arena import KIB, FakeClock, place, small
from tests.support.tiers import files
from vllm_omni_sched.config.errors import NoRoomError
from vllm_omni_sched.connectors.arena import ArenaTransport
from vllm_omni_sched.connectors.disk import DiskTransport
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.tiers import TieredTransport

EDGES = [Edge("0", "1"), Edge("1", "2")]
KEYS = ["a", "b", "c", "d/e", ""]
SIZES = [10, 900, 5000, 20_000, 70_000]
TTL, UPPER, LOWER = 60.0, 128 * KIB, 256 * KIB
Name = tuple[Edge, str]


class World:
    """A sender and a receiver over an arena and files, and what ought to wait."""

    def __init__(self) -> None:
        self.clock, self.place = FakeClock(), place()
        root = self.place.__enter__()
        pool = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": UPPER, "inline_bytes": 1 * KIB}
        options = small(root, image=pool, max_messages=64, ttl_seconds=TTL)

        def end() -> TieredTransport:
            upper = ArenaTransport(options, clock=self.clock)
            lower = DiskTransport(files(root, max_bytes=LOWER, ttl_seconds=TTL), clock=self.clock)
            return TieredTransport([upper, lower], clock=self.clock)

        self.sender, self.receiver = end(), end()
        self.waiting: dict[Name, tuple[int, float]] = {}  # number, and when it was put
        self.number = self.refused = 0
        self.used = set[str]()

    def put(self, name: Name, nbytes: int) -> None:
        self.number += 1
        message = make_message(*name, {"n": self.number, "x": np.full((1, nbytes), self.number % 251, np.uint8)})
        try:
            self.sender.put(message)
        except NoRoomError:
            self.refused += 1
            return
        self.used.add(self.sender.carrier())
        self.waiting[name] = self.number, self.clock()

    def get(self, name: Name) -> None:
        self.expire()
        arrival = self.receiver.get(*name)
        if arrival is None:
            assert name not in self.waiting
            return
        number, _ = self.waiting.pop(name)
        found = arrival.open()
        assert found["n"] == number
        assert (found["x"] == number % 251).all()

    def discard(self, key: str) -> None:
        self.expire()
        names = [name for name in self.waiting if name[1] == key]
        assert self.sender.discard(key) == len(names)
        for name in names:
            del self.waiting[name]

    def expire(self) -> None:
        self.sender.reap()
        self.waiting = {name: one for name, one in self.waiting.items() if self.clock() - one[1] <= TTL}

    def check(self) -> None:
        self.expire()
        facts = self.sender.health().facts
        assert facts["in_flight"] == sum(facts["tier_messages"].values()) == len(self.waiting)
        assert facts["refused"] == self.refused
        assert facts["disk"]["in_flight"] == facts["tier_messages"]["disk"]
        assert facts["disk"]["in_flight_bytes"] <= LOWER
        waiting = {edge: len(one.waiting) for (_, edge), one in self.sender.traffic().items() if one.waiting}
        assert waiting == {edge: n for edge in EDGES if (n := sum(name[0] == edge for name in self.waiting))}

    def end(self) -> None:
        """All that waits can be got, and then nothing is anywhere."""
        for name in list(self.waiting):
            self.get(name)
        assert not self.waiting
        self.check()
        for path in (self.sender, self.receiver):
            path.close()
        self.place.__exit__(None, None, None)


names = st.tuples(st.sampled_from(EDGES), st.sampled_from(KEYS))


class TiersMachine(RuleBasedStateMachine):
    world: World

    @initialize()
    def begin(self) -> None:
        self.world = World()

    @rule(name=names, nbytes=st.sampled_from(SIZES))
    def put(self, name: Name, nbytes: int) -> None:
        self.world.put(name, nbytes)

    @rule(name=names)
    def get(self, name: Name) -> None:
        self.world.get(name)

    @rule(key=st.sampled_from(KEYS))
    def discard(self, key: str) -> None:
        self.world.discard(key)

    @rule(seconds=st.sampled_from([0.01, 1.0, 5.0, TTL / 2, TTL + 1]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_long_random_workloads() -> None:
    """Twice 1,000 steps, in which the receiver is now slow, now quick."""
    used, refused = set[str](), 0
    for seed in range(2):
        rng, world = random.Random(seed), World()
        for step in range(1000):
            name = rng.choice(EDGES), f"{rng.choice(KEYS)}{rng.randrange(4)}"
            puts, gets = (60, 10) if step // 100 % 2 else (10, 60)
            match rng.choices(["put", "get", "discard", "wait"], [puts, gets, 2, 8])[0]:
                case "put":
                    world.put(name, rng.choice(SIZES))
                case "get":
                    world.get(name)
                case "discard":
                    world.discard(name[1])
                case "wait":
                    world.clock.now += rng.choice([0.01, 1.0, 3.0])
            if step % 10 == 0:
                world.check()
        used |= world.used
        refused += world.refused
        world.end()
    assert used == {"arena", "disk"}
    assert refused

"""Tiers under any workload, against a model: each message is in one place, or in a known pair while it moves; it is got
once, and none is lost."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.arena import KIB, FakeClock, place, small
from tests.support.tiers import Refusing, expect, files
from vllm_omni_sched.config.errors import NoRoomError
from vllm_omni_sched.connectors.arena import ArenaTransport
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.tiers import Tier, TieredTransport, TiersOptions
from vllm_omni_sched.connectors.tiers.carry import Stage
from vllm_omni_sched.connectors.tiers.ledger import Item, Owner

EDGES = [Edge("0", "1"), Edge("1", "2")]
KEYS = ["a", "b", "c", "d/e", ""]
SIZES = [10, 900, 5000, 20_000, 70_000]
TTL, UPPER, LOWER = 60.0, 128 * KIB, 256 * KIB
Name = tuple[Edge, str]


class World:
    """A sender and a receiver over an arena and files, moves that are made step by step, and what ought to be where."""

    def __init__(self) -> None:
        self.clock, self.place = FakeClock(), place()
        root = self.place.__enter__()
        pool = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": UPPER, "inline_bytes": 1 * KIB}
        options = small(root, image=pool, max_messages=64, ttl_seconds=10 * TTL)
        rules = TiersOptions(
            min_bytes=0, ttl_seconds=TTL, expected_wait_seconds=5.0, long_wait_seconds=20.0, soon_seconds=1.0
        )

        def end() -> TieredTransport:
            upper = ArenaTransport(options, clock=self.clock)
            lower = Refusing(files(root, max_bytes=LOWER, ttl_seconds=10 * TTL), clock=self.clock)
            tiers = [Tier(upper, {"text": 1 << 20, "image": UPPER, "audio": 1 << 20}), Tier(lower, {"": LOWER})]
            return TieredTransport(tiers, rules, clock=self.clock, background=False)

        self.sender, self.receiver = end(), end()
        self.upper, self.lower = self.sender._transports
        self.waiting: dict[Name, tuple[int, float]] = {}  # number, and when it was put
        self.move: Iterator[Stage] | None = None
        self.moving: tuple[Item, Stage] | None = None
        self.number = self.refused = self.moved = 0

    def put(self, name: Name, nbytes: int, hint: float | None) -> None:
        self.number += 1
        message = make_message(*name, {"n": self.number, "x": np.full((1, nbytes), self.number % 251, np.uint8)})
        expect(self.sender, 5.0 if hint is None else hint)
        try:
            self.sender.put(message)
        except NoRoomError:
            self.refused += 1
            return
        self.waiting[name] = self.number, self.clock()

    def get(self, name: Name) -> None:
        arrival = self.receiver.get(*name)
        if arrival is None:
            late = name not in self.waiting or self.clock() - self.waiting[name][1] > TTL
            assert late or self.is_leased(name)
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

    def step(self, which: int) -> None:
        """Begin a move, or go on with the one that was begun."""
        if self.move is None:
            self.expire()
            moves = self.sender.moves()
            if not moves:
                return
            item, move = moves[which % len(moves)]
            self.moving = item, Stage.LEASED
            self.move = self.sender.carry(item, move)
        assert self.moving is not None
        stage = next(self.move, None)
        if stage is None:
            self.move = self.moving = None
            self.moved += 1
        else:
            self.moving = self.moving[0], stage

    def meddle(self, what: str) -> None:
        """With the message that is being moved."""
        assert self.moving is not None
        item = self.moving[0]
        match what:
            case "put":
                self.put((item.edge, item.key), 5000, None)
            case "get":
                self.get((item.edge, item.key))
            case "discard":
                self.discard(item.key)

    def is_leased(self, name: Name) -> bool:
        """Whether the message of that name is the one that is being moved, and neither here nor there."""
        if self.moving is None or self.moving[1] is not Stage.LEASED:
            return False
        return self.sender.ledger.get(name_of(*name)) is self.moving[0]

    def expire(self) -> None:
        self.sender.reap()
        for name, (_, at) in list(self.waiting.items()):
            if self.clock() - at > TTL and not self.is_leased(name):
                del self.waiting[name]

    def check(self) -> None:
        self.expire()
        ledger, used = self.sender.ledger, 0
        assert {item.name for item in ledger.all()} == {name_of(*name) for name in self.waiting}
        for edge, key in self.waiting:
            item = ledger.get(name_of(edge, key))
            assert item is not None
            places = [self.upper.holds(edge, key), self.lower.holds(edge, key)]
            if self.is_leased((edge, key)):
                assert item.owner == Owner.MOVER
                assert places == [False, False]
            else:
                assert places == [item.tier == 0, item.tier == 1]
            used += item.nbytes
        assert sum(ledger.used.values()) == sum(ledger.waiting_bytes.values()) == used
        assert sum(ledger.lying.values()) == sum(ledger.waiting.values()) == len(ledger)
        facts = self.sender.health().facts
        gone = sum(facts[name] for name in ("consumed", "replaced", "discarded", "expired"))
        assert facts["put"] == gone + facts["in_flight"]
        assert facts["refused"] == self.refused
        assert facts["moves_failed"] == 0

    def end(self) -> None:
        """All that waits can be got, and then nothing is anywhere."""
        while self.move is not None:
            self.step(0)
        self.lower.refuses = False  # type: ignore[attr-defined]
        self.expire()
        for name in list(self.waiting):
            self.get(name)
        assert not self.waiting
        self.check()
        facts = self.sender.health().facts
        assert facts["arena"].get("in_flight", 0) == facts["disk"]["in_flight"] == 0
        assert facts["disk"]["in_flight_bytes"] == 0
        for path in (self.sender, self.receiver):
            assert path.health().facts["repeated"] == 0
            path.close()
        self.place.__exit__(None, None, None)


names = st.tuples(st.sampled_from(EDGES), st.sampled_from(KEYS))


class TiersMachine(RuleBasedStateMachine):
    world: World

    @initialize()
    def begin(self) -> None:
        self.world = World()

    @rule(name=names, nbytes=st.sampled_from(SIZES), hint=st.sampled_from([None, None, 0.0, 100.0]))
    def put(self, name: Name, nbytes: int, hint: float | None) -> None:
        self.world.put(name, nbytes, hint)

    @rule(name=names)
    def get(self, name: Name) -> None:
        self.world.get(name)

    @rule(key=st.sampled_from(KEYS))
    def discard(self, key: str) -> None:
        self.world.discard(key)

    @rule(which=st.integers(0, 100))
    def step(self, which: int) -> None:
        self.world.step(which)

    @precondition(lambda self: self.world.moving is not None)
    @rule(what=st.sampled_from(["put", "get", "discard"]))
    def meddle(self, what: str) -> None:
        self.world.meddle(what)

    @rule(seconds=st.sampled_from([0.01, 1.0, 5.0, TTL / 2, TTL + 1]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @rule(refuses=st.booleans())
    def lower_tier_refuses(self, refuses: bool) -> None:
        self.world.lower.refuses = refuses  # type: ignore[attr-defined]

    @rule(seconds=st.sampled_from([0.0, 100.0]))
    def others_waited(self, seconds: float) -> None:
        expect(self.world.sender, seconds)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


EVENTS = {"step": 60, "waited": 10, "discard": 2, "wait": 8, "refuse": 1, "meddle": 10}
"""Beside puts and gets, and how often."""


def test_long_random_workloads() -> None:
    """Four times 1,000 steps, in which the receiver is now slow, now quick."""
    placed, moved, moves = set[str](), set[str](), 0
    for seed in range(4):
        rng, world = random.Random(seed), World()
        for step in range(1000):
            name = rng.choice(EDGES), f"{rng.choice(KEYS)}{rng.randrange(4)}"
            puts, gets = (60, 10) if step // 100 % 2 else (10, 60)
            events = {"put": puts, "get": gets, **EVENTS}
            match rng.choices(list(events), list(events.values()))[0]:
                case "put":
                    world.put(name, rng.choice(SIZES), rng.choice([None, None, 0.0, 100.0]))
                case "get":
                    world.get(name)
                case "step":
                    world.step(rng.randrange(100))
                case "waited":
                    expect(world.sender, rng.choice([0.5, 0.5, 100.0]))
                case "discard":
                    world.discard(name[1])
                case "meddle" if world.moving is not None:
                    world.meddle(rng.choice(["put", "get", "discard"]))
                case "wait":
                    world.clock.now += rng.choice([0.01, 1.0, 3.0])
                case "refuse":
                    world.lower.refuses = rng.random() < 0.5  # type: ignore[attr-defined]
            if step % 10 == 0:
                world.check()
        facts = world.sender.health().facts
        moves += world.moved
        placed |= {name.split()[1] for name in facts["placed"]}
        moved |= set(facts["moved"])
        world.end()
    assert moves > 60
    assert placed == {"first", "no_room", "long_wait"}
    assert moved == {"arena->disk high_water", "disk->arena expected_soon"}

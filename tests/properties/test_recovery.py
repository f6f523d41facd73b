"""Whatever dies when: each request leaves exactly once, no finished stage runs again whose output is held, and a death
that is reported again and again leads to one start.
"""

import math
import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.monitor.recovery.events import (
    Aborted,
    Cleared,
    Deliver,
    Died,
    Dispatched,
    Fail,
    Finished,
    OutputLost,
    Recalled,
    Redispatch,
    Replica,
    Restart,
    Restarted,
    RestartFailed,
    Suspected,
    Tick,
)
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions
from vllm_omni_sched.monitor.recovery.policy import Recovery
from vllm_omni_sched.monitor.recovery.state import SERVING, Phase

STAGES = 3
SOURCES = {0: (), 1: (0,), 2: (1,)}
KINDS = ["arrive", "arrive", "finish", "finish", "finish", "die", "die", "up", "down", "suspect", "clear"]
KINDS += ["abort", "lose", "recall", "tick", "stale"]


class World:
    """Replicas that run what they are given, and an orchestrator that does what it is told."""

    def __init__(self, seed, replicas, limit, options):
        self.rng = random.Random(seed)
        names = [Replica(stage, index) for stage in range(STAGES) for index in range(replicas)]
        self.recovery = Recovery(dict.fromkeys(names, limit), SOURCES, options, random.Random(seed + 1))
        self.names = names
        self.now = 0.0
        self.entered = 0
        self.left = Counter()
        self.running = {}  # request -> replica, attempt
        self.held = {}
        self.restarts = set()  # under way
        self.to_start = Counter()  # replicas that have died, or whose start has failed, and were not started since
        self.old = []  # answers that came too late

    def tell(self, event):
        self.obey(self.recovery.on_event(event, self.now))

    def obey(self, actions):
        for action in actions:
            match action:
                case Redispatch(name, replica, attempt, stages):
                    assert self.recovery.phase(replica) in (Phase.HEALTHY, Phase.BACK)
                    assert name not in self.running or attempt >= self.running[name][1]
                    assert not set(stages) & self.held[name]
                    assert stages[0] == replica.stage
                    assert stages[0] == 0 or stages[0] - 1 in self.held[name]
                    if name in self.running and self.running[name][1] != attempt:  # else it never reached a replica
                        self.old.append((name, self.running[name][1]))
                    self.running[name] = (replica, attempt)
                case Fail(name, _):
                    self.left[name] += 1
                    self.running.pop(name, None)
                case Restart(replica):
                    assert replica not in self.restarts, f"{replica} is started twice at a time"
                    self.to_start[replica] -= 1
                    assert self.to_start[replica] == 0, f"{replica} is started, and has not died"
                    self.restarts.add(replica)
        for name, count in self.left.items():
            assert count == 1, name

    def dispatch(self, name, stage):
        replica = self.rng.choice([one for one in self.names if one.stage == stage])
        self.running[name] = (replica, self.recovery.attempt(name) + 1)
        self.tell(Dispatched(name, replica))

    def alive(self, name):
        replica, attempt = self.running[name]
        return name in self.recovery.in_flight(replica) and self.recovery.attempt(name) == attempt

    def finish(self, name):
        replica, attempt = self.running.pop(name)
        final = replica.stage == STAGES - 1
        actions = self.recovery.on_event(Finished(name, attempt, final), self.now)
        assert actions[0] == Deliver(name)
        self.held[name].add(replica.stage)
        self.obey(actions[1:])  # others may have a place now
        if final:
            self.left[name] += 1
        else:
            self.dispatch(name, replica.stage + 1)
        self.tell(Tick())

    def step(self, kind):
        self.now += self.rng.expovariate(1.0)
        some = [name for name in sorted(self.running) if self.alive(name)]
        if kind == "arrive":
            name = f"r{self.entered}"
            self.entered += 1
            self.held[name] = set()
            self.dispatch(name, 0)
        elif kind == "finish" and some:
            self.finish(self.rng.choice(some))
        elif kind == "stale" and self.old:
            name, attempt = self.rng.choice(self.old)
            actions = self.recovery.on_event(Finished(name, attempt, True), self.now)
            assert Deliver(name) not in actions
            self.obey(actions)
        elif kind == "abort" and self.running:
            name = self.rng.choice(sorted(self.running))
            self.running.pop(name)
            self.left[name] += 1
            self.tell(Aborted(name))
        elif kind == "lose" and self.running:
            name = self.rng.choice(sorted(self.running))
            stage = self.rng.randrange(STAGES)
            self.held[name].discard(stage)
            self.tell(OutputLost(name, stage))
        elif kind == "recall" and some:
            name = self.rng.choice(some)
            stage = self.running[name][0].stage
            if stage and stage - 1 in self.held[name]:  # its input was lost on its way
                self.held[name].discard(stage - 1)
                self.tell(OutputLost(name, stage - 1))
                self.tell(Recalled(name))
        elif kind in ("die", "suspect", "clear"):
            what, replica = {"die": Died, "suspect": Suspected, "clear": Cleared}[kind], self.rng.choice(self.names)
            self.to_start[replica] += what is Died and self.recovery.phase(replica) in SERVING
            self.tell(what(replica))
        elif kind in ("up", "down") and self.restarts:
            replica = self.rng.choice(sorted(self.restarts))
            self.restarts.discard(replica)
            self.to_start[replica] += kind == "down"
            self.tell((Restarted if kind == "up" else RestartFailed)(replica))
        elif kind == "tick":
            self.now = max(self.now, min(self.recovery.next_wake(), self.now + 100))
            self.tell(Tick())

    def end(self):
        """Nothing dies any more: everything leaves, and soon."""
        for _ in range(20 * (self.entered + len(self.names)) + 50):
            if not len(self.recovery):
                return
            for replica in sorted(self.restarts):
                self.restarts.discard(replica)
                self.tell(Restarted(replica))
            for name in sorted(self.running):
                if name in self.running and self.alive(name):
                    self.finish(name)
            if math.isfinite(self.recovery.next_wake()):
                self.now = max(self.now, self.recovery.next_wake())
            self.tell(Tick())
        raise AssertionError(f"{len(self.recovery)} requests never leave")


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kinds=st.lists(st.sampled_from(KINDS), max_size=150),
    replicas=st.integers(1, 3),
    limit=st.sampled_from([1, 3, math.inf]),
    restart=st.booleans(),
    poison_deaths=st.integers(1, 4),
    max_redispatches=st.integers(0, 4),
    together=st.integers(1, 3),
)
def test_each_request_leaves_exactly_once(
    seed, kinds, replicas, limit, restart, poison_deaths, max_redispatches, together
):
    options = RecoveryOptions(
        restart=restart,
        poison_deaths=poison_deaths,
        max_redispatches=max_redispatches,
        last_chance_together=together,
        max_wait_seconds=20.0,
    )
    world = World(seed, replicas, limit, options)
    for kind in kinds:
        world.step(kind)
    world.end()
    assert world.left == Counter({f"r{number}": 1 for number in range(world.entered)})
    assert all(not world.recovery.in_flight(replica) for replica in world.names)

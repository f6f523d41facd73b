"""Run each detector on a healthy subject and on one with an injected fault; seeded, in simulated time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.support.monitored import LOADS, stage
from vllm_omni_sched.monitor.anomaly import Anomaly, MemoryLeak, SickEdge, Silence, StageTimeout, StuckQueue

GB = 2**30
LOOK_SECONDS = 5.0
MEMORY_SECONDS = 10.0
LEAK_BYTES_PER_SECOND = 2**20
"""Of 80 GB, of which 20 are used."""


@dataclass
class Alarms:
    """Alarms of a detector; an alarm that lasts counts once."""

    looks: int = 0
    false: int = 0
    found_at: float | None = None
    _ill: set[tuple[str, str]] = field(default_factory=set)

    def look(self, found: tuple[Anomaly, ...], now: float, fault_at: float, guilty: str | None = None) -> bool:
        """Record the findings at ``now``, and return whether the fault has been found.

        ``guilty``: the faulty subject from ``fault_at`` on; None: any subject.
        """
        ill = {(one.subject, one.request_id) for one in found}
        self.looks += 1
        for subject, request in ill:
            at_fault = now >= fault_at and guilty in (None, subject)
            if at_fault and self.found_at is None:
                self.found_at = now
            self.false += not at_fault and (subject, request) not in self._ill
        self._ill = ill
        return self.found_at is not None


def hung_request(load: str, rng: random.Random, seconds: float, fault_at: float) -> Alarms:
    """Let one request never end."""
    watch, alarms = StageTimeout(), Alarms()
    for one in stage(load, rng, seconds, hang_at=fault_at):
        if one.what == "enter":
            watch.enter("s", one.request_id, one.at)
        elif one.what == "leave":
            watch.observe("s", one.request_id, one.at)
        elif alarms.look(watch.check(one.at), one.at, fault_at):
            break
    return alarms


def standing_queue(load: str, rng: random.Random, seconds: float, fault_at: float) -> Alarms:
    """Let no request of the stage end any more."""
    watch, alarms = StuckQueue(), Alarms()
    for one in stage(load, rng, seconds, stand_at=fault_at):
        watch.observe("s", one.at, one.waiting, one.running)
        if one.what == "leave":
            watch.finished("s", one.at, one.service_seconds)
        elif one.what == "look" and alarms.look(watch.check(one.at), one.at, fault_at):
            break
    return alarms


def hanging_replica(load: str, rng: random.Random, seconds: float, fault_at: float) -> Alarms:
    """Let the replica fall silent: it sends nothing, and its host sleeps as if its device computed."""
    watch, alarms = Silence(), Alarms()
    for one in stage(load, rng, seconds, stand_at=fault_at):
        if one.what == "leave":
            watch.heard("s", 0, one.at)
        watch.observe("s", 0, one.at, work=one.running > 0, computes=False)
        if one.what == "look" and alarms.look(watch.check(one.at), one.at, fault_at):
            break
    return alarms


def leak(load: str, rng: random.Random, seconds: float, fault_at: float) -> Alarms:
    """Let memory, which follows the load with correlated noise, also grow by a megabyte a second."""
    watch, alarms, noise = MemoryLeak(), Alarms(), 0.0
    for i in range(int(seconds / MEMORY_SECONDS)):
        now = i * MEMORY_SECONDS
        expected = 3 * LOADS[load](now)
        in_flight = max(0.0, rng.gauss(expected, math.sqrt(expected)))
        noise = 0.9 * noise + rng.gauss(0, 0.044 * GB)
        used = 20 * GB + 0.2 * GB * in_flight + noise + LEAK_BYTES_PER_SECOND * max(0.0, now - fault_at)
        watch.observe("s", now, used, 80 * GB, in_flight)
        if alarms.look(watch.check(now), now, fault_at):
            break
    return alarms


def slow_edge(load: str, rng: random.Random, seconds: float, fault_at: float) -> Alarms:
    """Let one edge of three take twice as long."""
    return _edges(load, rng, seconds, fault_at, slower=2.0, failing=0.0)


def failing_edge(load: str, rng: random.Random, seconds: float, fault_at: float) -> Alarms:
    """Let one edge of three fail for 30% of its messages, and all for one of a thousand."""
    return _edges(load, rng, seconds, fault_at, slower=1.0, failing=0.3)


def _edges(load: str, rng: random.Random, seconds: float, fault_at: float, slower: float, failing: float) -> Alarms:
    watch, alarms = SickEdge(), Alarms()
    for now, edge, nbytes, in_flight in _transfers(load, rng, seconds):
        if edge < 0:
            if alarms.look(watch.check(now), now, fault_at, "0"):
                break
            continue
        sick = edge == 0 and now >= fault_at
        took = (1e-4 + nbytes / 1e9) * (1 + 0.5 * (in_flight - 1)) * (1 + edge) * rng.lognormvariate(0, 0.3)
        failed = rng.random() < (failing if sick and failing else 1e-3)
        watch.observe(str(edge), now, took * (slower if sick else 1.0), nbytes, in_flight, ok=not failed)
    return alarms


def _transfers(load: str, rng: random.Random, seconds: float) -> Iterator[tuple[float, int, int, int]]:
    """Yield (time, edge, bytes, transfers in flight); edge -1: the detector is to be asked."""
    for now in range(int(seconds)):
        rate = LOADS[load](now)
        for edge in range(3):
            for _ in range(min(4, int(rng.expovariate(1) * rate / 2 + rng.random()))):
                yield now, edge, rng.choice([1000, 2**20]), 1 + int(rng.expovariate(1 / rate))
        if now % int(LOOK_SECONDS) == 0:
            yield now, -1, 0, 0


FAULTS: dict[str, Callable[[str, random.Random, float, float], Alarms]] = {
    "hung request": hung_request,
    "standing queue": standing_queue,
    "hanging replica": hanging_replica,
    "memory leak": leak,
    "slow edge": slow_edge,
    "failing edge": failing_edge,
}

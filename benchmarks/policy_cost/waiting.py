"""Decisions about those who wait: the order, the gate, and the gate as it is when all are looked at."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from typing import Any

from benchmarks.policy_cost.bench import Bench, Clock, Decision
from tests.support.plain_gate import PlainGate
from vllm_omni_sched.graph.order import DEFAULT_CLASSES, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.waiting_queue import WaitingQueue
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_gate import GateRequest, GateTerms, StageGate

REPLICAS = 8
LIMIT = 32


class Requests:
    """Makes a request per millisecond: three classes, costs over two decades, a third shares an item with others."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._numbers, self._clock = rng, count(), Clock()

    @property
    def now(self) -> float:
        return self._clock.now

    def next(self) -> WaitingRequest:
        rng = self._rng
        return WaitingRequest(
            f"r{next(self._numbers)}",
            self._clock(),
            rng.choice(DEFAULT_CLASSES),
            10 ** rng.uniform(-3, -1),
            affinity=frozenset([f"item {rng.randrange(100)}"] if rng.random() < 0.33 else []),
        )

    def at_gate(self) -> GateRequest:
        """Return the next request at a gate; a tenth of them are long."""
        waiting = self.next()
        units = self._rng.randrange(64, 4096) if self._rng.random() < 0.1 else 0
        return GateRequest(waiting, low=waiting.sla.rank == 2, units=units)


def _queue(waiting: int, rng: random.Random) -> tuple[WaitingQueue, Requests]:
    queue, requests = WaitingQueue(WaitingOrder()), Requests(rng)
    for _ in range(waiting):
        queue.push(requests.next(), requests.now)
    return queue, requests


def push(waiting: int, rng: random.Random) -> Bench:
    queue, requests = _queue(waiting, rng)
    return Bench(
        lambda one: queue.push(one, requests.now),
        requests.next,
        lambda one, _: queue.remove(one.request_id),
    )


def pop(waiting: int, rng: random.Random) -> Bench:
    queue, requests = _queue(waiting, rng)
    return Bench(
        lambda _: queue.pop(requests.now),
        after=lambda _, popped: queue.push(requests.next(), requests.now),
    )


def sort_all(waiting: int, rng: random.Random) -> Bench:
    order, requests = WaitingOrder(), Requests(rng)
    all_of_them = [requests.next() for _ in range(waiting)]
    return Bench(lambda _: order.plan(all_of_them, requests.now))


class NoCredits(GateTerms):
    """A stage behind this one is full."""

    def has_credits(self, needs: object) -> bool:
        return False


def _replicas(places: int, rng: random.Random) -> list[ReplicaState]:
    """Return replicas of which ``places`` have room for one request."""
    return [
        ReplicaState(i, rng.uniform(1, 9), LIMIT - (i < places), LIMIT, units=64, units_limit=16384)
        for i in range(REPLICAS)
    ]


def gate(make: Callable[[], Any], places: int, terms: GateTerms | None = None) -> Callable[[int, random.Random], Bench]:
    """Return the bench of a gate's decision; as many requests arrive as were released."""

    def laid_out(waiting: int, rng: random.Random) -> Bench:
        tried, requests, replicas = make(), Requests(rng), _replicas(places, rng)
        for _ in range(waiting):
            tried.put(requests.at_gate(), requests.now)

        def again(_: object, plan: Any) -> None:
            for _ in plan.releases:
                tried.put(requests.at_gate(), requests.now)

        return Bench(lambda _: tried.release(requests.now, replicas, rng, terms), after=again)

    return laid_out


def put(waiting: int, rng: random.Random) -> Bench:
    tried, requests = StageGate(), Requests(rng)
    for _ in range(waiting):
        tried.put(requests.at_gate(), requests.now)
    return Bench(
        lambda one: tried.put(one, requests.now),
        requests.at_gate,
        lambda one, _: tried.remove(one.request_id),
    )


def _ours() -> StageGate:
    return StageGate(max_hold_seconds=0.0)


def _all_looked_at() -> PlainGate:
    return PlainGate(WaitingOrder(), 0.0, 0.1, 64)


DECISIONS = (
    Decision("WaitingQueue.push", "waiting", push),
    Decision("WaitingQueue.pop", "waiting", pop),
    Decision("WaitingOrder.plan, all looked at", "waiting", sort_all, barred=False),
    Decision("StageGate.put", "waiting", put),
    Decision("StageGate.release, one place", "waiting", gate(_ours, 1)),
    Decision("StageGate.release, 8 places", "waiting", gate(_ours, REPLICAS), barred=False),
    Decision("StageGate.release, no room", "waiting", gate(_ours, 0)),
    Decision("StageGate.release, no credits", "waiting", gate(_ours, 1, NoCredits())),
    Decision("gate, one place, all looked at", "waiting", gate(_all_looked_at, 1), barred=False),
    Decision("gate, no room, all looked at", "waiting", gate(_all_looked_at, 0), barred=False),
)

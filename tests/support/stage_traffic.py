"""Synthetic traffic through three stages, told to a `StageBoard` and to connectors as it happens."""

import heapq
import math
import random
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest

from tests.support.connector_traffic import ConnectorTraffic
from tests.support.scheduler_traffic import Families
from vllm_omni_sched.monitor.exposition import merge
from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.monitor.stage_metrics import StageCollector

REPLICAS = {0: 1, 1: 2, 2: 1}
SECONDS = {0: 0.25, 1: 0.6, 2: 0.1}
CAPACITY = 64
LIMIT = 8
RATE = 9.0
SEASON = 30.0
ANOMALIES = ("stage_timeout", "memory_leak", "stuck_queue", "silent_replica")
INCIDENTS = ("died", "restarted", "redispatched")


class StageTraffic:
    """Requests that come at a rate with a season, run in batches, and now and then a replica dies."""

    def __init__(self, seed: int = 0) -> None:
        self.board = StageBoard(REPLICAS, anomalies=ANOMALIES, incidents=INCIDENTS, reasons=["stalled"])
        self._rng = random.Random(seed)
        self._waiting = {(stage, replica): [] for stage, n in REPLICAS.items() for replica in range(n)}
        self._running = dict.fromkeys(self._waiting, ())
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._arrivals = 0
        self._connectors = {stage: ConnectorTraffic(f"{stage}->{stage + 1}", self._rng) for stage in (0, 1)}
        self.at(0.0, self._arrive)
        self.at(0.0, self._measure)
        self.at(SEASON / 2, self._die)

    def at(self, when: float, what: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, what))

    def advance(self, now: float) -> None:
        """Let happen what is due."""
        while self._events and self._events[0][0] <= now:
            when, _, what = heapq.heappop(self._events)
            what(when)

    def page(self) -> bytes:
        """Return the metrics as they are now."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StageCollector(self.board))
        pages = [({"stage": str(stage)}, of.metrics.page().decode()) for stage, of in self._connectors.items()]
        registry.register(Families(merge(pages)))
        return generate_latest(registry)

    def rate(self, now: float) -> float:
        return RATE * (1 + 0.6 * math.sin(2 * math.pi * now / SEASON))

    def _arrive(self, now: float) -> None:
        self._arrivals += 1
        if self._rng.random() < 0.2:
            self.board.merged(0)
        else:
            self._submit(0, f"r{self._arrivals}", now)
        self.at(now + self._rng.expovariate(self.rate(now)), self._arrive)

    def _submit(self, stage: int, request: str, now: float) -> None:
        replica = min(range(REPLICAS[stage]), key=lambda one: len(self._waiting[stage, one]))
        self.board.looked_up(stage, replica, hit=self._rng.random() < 0.7)
        if stage < 2:  # a vocoder has neither prompts nor items
            found = int(self._rng.random() < 0.4 + 0.2 * stage)
            self.board.cache(stage, replica, "prefix", 400 * found, 500 - 400 * found)
        if stage == 0:
            found = int(self._rng.random() < 0.3)
            self.board.cache(stage, replica, "encoder", found, 1 - found)
        self.board.submitted(stage, replica, request, now)
        self._waiting[stage, replica].append(request)
        self._run((stage, replica), now)

    def _run(self, where: tuple[int, int], now: float) -> None:
        if self._running[where] or not self._waiting[where]:
            return
        batch, self._waiting[where] = tuple(self._waiting[where][:LIMIT]), self._waiting[where][LIMIT:]
        self._running[where] = batch
        self.board.batch(*where, len(batch))
        for request in batch:
            self.board.started(*where, request, now)
        self.at(now + SECONDS[where[0]] * self._rng.lognormvariate(0, 0.5), lambda at: self._finish(where, batch, at))

    def _finish(self, where: tuple[int, int], batch: tuple[str, ...], now: float) -> None:
        if self._running[where] is not batch:
            return  # it died
        self._running[where] = ()
        for request in batch:
            self.board.finished(*where, request, now, ok=self._rng.random() > 0.01)
            if where[0] + 1 in REPLICAS:
                nbytes = int(self._rng.lognormvariate(13, 1))
                edge = where[0], where[0] + 1
                self.board.edge(*edge, self._rng.lognormvariate(-6, 0.5))
                self.board.moved(*edge, "put", 1, nbytes, 2e-4 + nbytes / 2e9)
                self.board.moved(*edge, "get", 1, nbytes, 1e-4 + nbytes / 4e9)
                self._connectors[where[0]].message(nbytes)
                self._submit(where[0] + 1, request, now)
        self._run(where, now)

    def _die(self, now: float) -> None:
        where = (1, 1)
        self.board.anomaly(1, "silent_replica")
        self.board.given_up(1, "stalled")
        self.board.incident(*where, "died")
        gone = self.board.lost(*where)
        self._running[where], self._waiting[where] = (), []
        self.board.redispatched(*where, len(gone))
        for request in gone:
            self.board.incident(*where, "redispatched")
            self.board.submitted(1, 0, request, now)
            self._waiting[1, 0].append(request)
        self._connectors[0].died()
        self.board.restarted(*where)
        self.board.incident(*where, "restarted")
        self._run((1, 0), now)
        self.at(now + SEASON, self._die)

    def _measure(self, now: float) -> None:
        for where, waiting in self._waiting.items():
            held = len(waiting) + len(self._running[where])
            self.board.memory(*where, (4 << 30) + (held << 26), (1 << 30) + (held << 24))
            self.board.batch_limit(*where, LIMIT)
        for stage in REPLICAS:
            inside = sum(len(requests) for (of, _), requests in self._waiting.items() if of == stage)
            self.board.credits(stage, max(0, CAPACITY - inside))
        for modality, part in (("text", 0.5), ("image", 0.3), ("audio", 0.2)):
            noise = self._rng.gauss(1, 0.1)
            self.board.load(modality, observed=max(0.0, part * self.rate(now) * noise), forecast=part * self.rate(now))
        self.at(now + 0.5, self._measure)

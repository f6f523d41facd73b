"""Synthetic traffic through three stages, told to a `StageBoard` as it happens and served on a loopback port.

``python -m tests.support.stage_traffic docs/dashboards/stages.png`` draws the dashboard of it (needs a Prometheus).
"""

import argparse
import contextlib
import heapq
import importlib.util
import json
import math
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from tests.support.prometheus import binary, prometheus
from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.monitor.stage_metrics import StageCollector

RENDER = Path(__file__).parents[2] / "docs" / "dashboards" / "render.py"
REPLICAS = {0: 1, 1: 2, 2: 1}
SECONDS = {0: 0.25, 1: 0.6, 2: 0.1}
CAPACITY = 64
LIMIT = 8
RATE = 9.0
SEASON = 30.0
ANOMALIES = ("stage_timeout", "memory_leak", "stuck_queue", "silent_replica")
INCIDENTS = ("died", "restarted", "redispatched")


def render_module():
    """docs/dashboards/render.py; it is in no package."""
    spec = importlib.util.spec_from_file_location("render", RENDER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Traffic:
    """Requests that come at a rate with a season, run in batches, and now and then a replica dies."""

    def __init__(self, seed: int = 0) -> None:
        self.board = StageBoard(REPLICAS, anomalies=ANOMALIES, incidents=INCIDENTS, reasons=["stalled"])
        self._rng = random.Random(seed)
        self._waiting = {(stage, replica): [] for stage, n in REPLICAS.items() for replica in range(n)}
        self._running = dict.fromkeys(self._waiting, ())
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._arrivals = 0
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


@contextlib.contextmanager
def served_traffic() -> Iterator[int]:
    """Serve the metrics of traffic in real time on a loopback port."""
    traffic, stop = Traffic(), threading.Event()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StageCollector(traffic.board))

    def feed() -> None:
        began = time.monotonic()
        while not stop.wait(0.02):
            traffic.advance(time.monotonic() - began)

    class Page(BaseHTTPRequestHandler):
        """Serves the text format always, as vLLM's own page: prometheus_client's OpenMetrics drops colons."""

        def do_GET(self) -> None:
            page = generate_latest(registry)
            with contextlib.suppress(ConnectionError):  # Prometheus does not wait for long, and ends before we do
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE_LATEST)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    feeding = threading.Thread(target=feed, daemon=True)
    serving.start()
    feeding.start()
    try:
        yield server.server_port
    finally:
        stop.set()
        feeding.join(10)
        server.shutdown()
        server.server_close()
        serving.join(10)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw the dashboard of synthetic traffic.")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    command, render = binary(), render_module()
    if command is None:
        print("no Prometheus: put `prometheus` on PATH or name it in PROMETHEUS", file=sys.stderr)
        return 1
    dashboard = json.loads(render.DASHBOARD.read_text())
    with (
        tempfile.TemporaryDirectory() as folder,
        served_traffic() as port,
        prometheus(command, Path(folder), port) as url,
    ):
        time.sleep(given.seconds)
        end = time.time()
        window = render.Window(end - given.seconds, end, 1.0, 5.0)
        shown = {
            panel["id"]: [one for found in render.series_of(panel, dashboard, url, window) for one in found]
            for panel in render.panels(dashboard)
        }
    render.draw(dashboard, shown, given.picture, "synthetic traffic, drawn by docs/dashboards/render.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())

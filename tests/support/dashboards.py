"""Our dashboards, with synthetic traffic for each of them, served on a loopback port for a Prometheus.

``python -m tests.support.dashboards scheduler docs/dashboards/scheduler.png`` draws one of it.
"""

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST

from tests.support.prometheus import binary, prometheus
from tests.support.scheduler_traffic import SchedulerTraffic
from tests.support.stage_traffic import StageTraffic

FOLDER = Path(__file__).parents[2] / "docs" / "dashboards"


class Traffic(Protocol):
    def advance(self, now: float) -> None:
        """Let happen what is due."""

    def page(self) -> bytes:
        """Return the metrics as they are now."""


TRAFFIC: dict[str, Callable[[], Traffic]] = {"scheduler": SchedulerTraffic, "stages": StageTraffic}
"""Traffic that gives every metric of a dashboard a value."""


def render_module() -> Any:
    """docs/dashboards/render.py; it is in no package."""
    spec = importlib.util.spec_from_file_location("render", FOLDER / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


@contextlib.contextmanager
def served(traffic: Traffic) -> Iterator[int]:
    """Serve the metrics of traffic in real time on a loopback port."""
    stop = threading.Event()

    def feed() -> None:
        began = time.monotonic()
        while not stop.wait(0.02):
            traffic.advance(time.monotonic() - began)

    class Page(BaseHTTPRequestHandler):
        """Serves the text format always, as vLLM's own page: prometheus_client's OpenMetrics drops colons."""

        def do_GET(self) -> None:
            page = traffic.page()
            with contextlib.suppress(ConnectionError):  # Prometheus does not wait for long, and ends before we do
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE_LATEST)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
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
    parser = argparse.ArgumentParser(description="Draw a dashboard of synthetic traffic.")
    parser.add_argument("dashboard", choices=TRAFFIC)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0)
    given = parser.parse_args()
    command, render = binary(), render_module()
    if command is None:
        print("no Prometheus: put `prometheus` on PATH or name it in PROMETHEUS", file=sys.stderr)
        return 1
    dashboard = read(given.dashboard)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(TRAFFIC[given.dashboard]()) as port,
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

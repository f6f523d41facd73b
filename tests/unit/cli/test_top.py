"""`vllm-omni-sched top`: frames of a server as tables and as JSON, once and again and again."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.monitor.test_server_page import VLLM, metrics
from vllm_omni_sched.cli import app
from vllm_omni_sched.cli import top as module
from vllm_omni_sched.cli.top import SHOWN_DECISIONS
from vllm_omni_sched.core.engine.history_lines import HistoryLine, line_of
from vllm_omni_sched.monitor.exposition import render

pytestmark = pytest.mark.once  # nothing here reaches vLLM


class Pages:
    """A server that answers each request for its metrics with the next page, and then with the last one."""

    def __init__(self, *pages: str | int) -> None:
        self.left = list(pages)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = owner.left.pop(0) if len(owner.left) > 1 else owner.left[0]
                status = page if isinstance(page, int) else 200 if self.path == "/metrics" else 404
                self.send_response(status)
                self.end_headers()
                self.wfile.write(page.encode() if isinstance(page, str) else b"")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> Pages:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def text(times: int = 1) -> str:
    return VLLM + render(metrics(times)).decode()


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["top", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Let time pass without waiting; the third wait is Ctrl-C."""
    waited: list[float] = []
    clock = [100.0]

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        clock[0] += seconds
        if len(waited) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "sleep_seconds", sleep)
    monkeypatch.setattr(module, "monotonic_seconds", lambda: clock[0])
    return waited


@pytest.mark.parametrize("columns", ["160", None])
def test_once_prints_one_frame_with_what_happened_since_the_start(
    columns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns is None:
        monkeypatch.delenv("COLUMNS")
    with Pages(text()) as server:
        status, out, _ = run(server.url, "--once")
    said = re.sub(r" +", " ", out)
    assert status == 0
    assert "100 steps since the server started" in said
    for row in (
        "running 5",
        "waiting 4 (4 capacity)",
        "waiting by class 1 interactive, 3 batch",
        "KV cache in use 30%",
        "lanes 5 items wait, share 25%",
        "placements 2 would_stall_decode → lane, 1 no_decode → in_step",
        "taken from the queue 4 deadline",
        "lanes 2 items encoded ahead, wait P50 20 ms, P99 490 ms",
        "encoder cache 75% of 4 look-ups hit, 0 evicted; encodings by place: 2 lane",
        "interactive 90% 9 1 20 ms 490 ms –",
    ):
        assert f"\n{row}" in said
    assert "batch" not in said.replace("waiting by class 1 interactive, 3 batch", "")  # of which none has ended
    assert "stage" not in said


def test_json_has_the_values_of_the_frame() -> None:
    with Pages(text()) as server:
        status, out, _ = run(server.url, "--once", "--json")
    (frame,) = map(json.loads, out.splitlines())
    assert status == 0
    assert frame["at"] > 1e9
    assert (frame["seconds"], frame["steps"]) == (None, 100)
    assert frame["placements"] == {"would_stall_decode": 2, "no_decode": 1}
    assert frame["requests"]["waiting_by_class"] == {"realtime": 0, "interactive": 1, "batch": 3}
    assert frame["slo"]["interactive"]["fraction"] == 0.9
    assert frame["encoder_cache"]["hit_rate"] == 0.75


def test_counts_begin_again_with_a_server_that_has_restarted(sleeps: list[float]) -> None:
    with Pages(text(3), text(1), text(2)) as server:
        _, out, _ = run(server.url, "--json", "--interval", 10)
    frames = [json.loads(line) for line in out.splitlines()]
    assert [(frame["seconds"], frame["steps"]) for frame in frames] == [(None, 300), (None, 100), (10, 100)]


def test_the_live_view_goes_on_while_the_server_does_not_answer(sleeps: list[float]) -> None:
    with Pages(text(1), 503, text(2)) as server:
        status, out, _ = run(server.url)
    assert status == 0
    assert "as it was before: http://127.0.0.1:" in out
    assert "answers with HTTP status 503" in out
    assert "100 steps in the last 4 s" in re.sub(r" +", " ", out)


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (503, "answers with HTTP status 503: is this a vLLM server?"),
        (VLLM, "has no metrics of vllm-omni-sched: start the server with --scheduler-cls"),
        ("vllm:x{", "cannot be read: it is not a page of metrics"),
    ],
)
def test_a_server_without_our_metrics_is_an_error_of_one_line(page: str | int, says: str) -> None:
    with Pages(page) as server:
        status, out, error = run(server.url, "--once")
    assert (status, out) == (1, "")
    assert error.startswith("vllm-omni-sched top: http://127.0.0.1:")
    assert says in error
    assert len(error.splitlines()) == 1


def test_the_latest_decisions_are_those_of_the_history(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    lines = [HistoryLine(float(at), "taken", f"r{at}", "aged") for at in range(2 * SHOWN_DECISIONS)]
    lines.append(HistoryLine(99.0, "placed", "pictures-1", "would_stall_decode"))
    lines.append(HistoryLine(100.0, "first_token", "pictures-1"))  # follows, and is no decision
    path.with_name("history.jsonl.1").write_bytes(b"".join(map(line_of, lines[:15])))
    path.write_bytes(b"".join(map(line_of, lines[15:])) + b"nonsense\n")
    with Pages(text()) as server:
        status, out, _ = run(server.url, "--once", "--history", path)
        (frame,) = map(json.loads, run(server.url, "--once", "--json", "--history", path)[1].splitlines())
        assert "decisions" not in json.loads(run(server.url, "--once", "--json")[1])
    said = [" ".join(line.split()) for line in out.splitlines()]
    assert status == 0
    expected = [f"r{at}" for at in range(11, 20)] + ["pictures-1"]
    assert [one["request_id"] for one in frame["decisions"]] == expected
    assert frame["decisions"][-1] == {
        "at": 99.0,
        "transition": "placed",
        "request_id": "pictures-1",
        "detail": "would_stall_decode",
    }
    assert [line.split(" ")[1] for line in said[-SHOWN_DECISIONS:]] == expected
    assert "r19 It was taken from the queue, because it had waited for max_wait_seconds." in said[-2]


def test_a_server_that_is_not_there_is_an_error_of_one_line() -> None:
    with Pages(text()) as server:
        url = server.url
    status, _, error = run(url)
    assert status == 1
    assert "cannot be read: Connection refused; look whether the server runs" in error
    assert "--port" in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("address", ["ftp://host", "http://", ""])
def test_what_is_no_address_is_an_error(address: str) -> None:
    status, _, error = run(address)
    assert status == 2
    assert "is not the address of a server, such as http://localhost:8000" in error

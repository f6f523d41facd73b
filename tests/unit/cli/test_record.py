"""`vllm-omni-sched record` against a real HTTP server on loopback: one that goes on, and those that do not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.vllm_page import page
from vllm_omni_sched.cli import app
from vllm_omni_sched.cli import record as record_module
from vllm_omni_sched.sim.workloads.trace import read_trace

pytestmark = pytest.mark.once  # nothing here reaches vLLM


class Page(BaseHTTPRequestHandler):
    """Answers with what `pages` says for the n-th look, from 0."""

    pages: Callable[[int], str | int]
    looks = 0

    def do_GET(self) -> None:
        kind = type(self)
        said = kind.pages(kind.looks)
        kind.looks += 1
        if self.path != "/metrics":
            said = 404
        self.send_response(said if isinstance(said, int) else 200)
        self.end_headers()
        if isinstance(said, str):
            self.wfile.write(said.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def server(pages: Callable[[int], str | int]) -> Iterator[str]:
    handler = type("Handler", (Page,), {"pages": staticmethod(pages)})
    http = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def growing(look: int) -> str:
    """Two requests more at each look."""
    number = 2 * look
    return page(finished={"stop": number}, prompts=[40] * number, outputs=[7] * number, running=1)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock stands still but for sleeping; what was slept."""
    found: list[float] = []
    now = [50.0]

    def sleep(seconds: float) -> None:
        found.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(record_module, "sleep_seconds", sleep)
    monkeypatch.setattr(record_module, "monotonic_seconds", lambda: now[0])
    return found


def run(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["record", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout.strip(), " ".join(result.stderr.split())


def test_a_trace_is_recorded(tmp_path: Path, slept: list[float]) -> None:
    out = tmp_path / "trace.jsonl"
    with server(growing) as url:
        status, said, _ = run(url, "--out", out, "--seconds", 25, "--interval", 10)
    assert (status, said) == (0, f"3 intervals in {out}")
    assert slept == pytest.approx([10, 10, 5])
    trace = read_trace(out)
    assert [(one.at, one.seconds, one.arrivals) for one in trace.intervals] == [(0, 10, 2), (10, 10, 2), (20, 5, 2)]
    assert trace.intervals[0].prompt_tokens.total == 80
    assert trace.header.interval_seconds == 10
    assert trace.header.begins.endswith("+00:00")
    assert [file.name for file in tmp_path.iterdir()] == ["trace.jsonl"]


def test_by_the_real_clock(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    with server(growing) as url:
        status, _, _ = run(url + "/metrics/", "--out", out, "--seconds", 0.3, "--interval", 0.1)
    assert status == 0
    assert read_trace(out).seconds >= 0.299


def test_a_restarted_server_is_marked(tmp_path: Path, slept: list[float]) -> None:
    out = tmp_path / "trace.jsonl"
    with server(lambda look: growing((5, 6, 1, 2)[look])) as url:
        status, _, _ = run(url, "--out", out, "--seconds", 30)
    assert status == 0
    assert [one.restarted for one in read_trace(out).intervals] == [False, True, False]


def test_one_look_that_fails_makes_one_longer_interval(tmp_path: Path, slept: list[float]) -> None:
    out = tmp_path / "trace.jsonl"
    with server(lambda look: 503 if look in (2, 3) else growing(look)) as url:
        status, _, _ = run(url, "--out", out, "--seconds", 40)
    assert status == 0
    found = [(one.at, one.seconds, one.arrivals) for one in read_trace(out).intervals]
    assert found == [(0, 10, 2), (10, 30, 6)]


def test_a_server_that_dies_leaves_the_trace_so_far(tmp_path: Path, slept: list[float]) -> None:
    out = tmp_path / "trace.jsonl"
    with server(lambda look: growing(look) if look < 3 else 503) as url:
        status, said, problem = run(url, "--out", out, "--seconds", 1000)
    assert (status, said) == (1, "")
    assert (
        f"no answer to 3 scrapes in a row: it answers 503 Service Unavailable; "
        f"are its metrics on?; 2 intervals in {out}" in problem
    )
    assert len(read_trace(out).intervals) == 2
    assert len(slept) == 5


def test_a_server_whose_port_is_closed_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "trace.jsonl"
    now, stop = [0.0], []

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 15:
            stop.pop()() if stop else None

    monkeypatch.setattr(record_module, "sleep_seconds", sleep)
    monkeypatch.setattr(record_module, "monotonic_seconds", lambda: now[0])
    running = server(growing)
    url = running.__enter__()
    stop.append(lambda: running.__exit__(None, None, None))
    status, _, problem = run(url, "--out", out, "--seconds", 1000)
    assert status == 1
    assert "Connection refused; 1 intervals in" in problem.replace("[Errno 111] ", "")
    assert len(read_trace(out).intervals) == 1


def test_ctrl_c_ends_it_with_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    out = tmp_path / "trace.jsonl"
    sleep = record_module.sleep_seconds

    def interrupted(seconds: float) -> None:
        if len(slept) == 2:
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(record_module, "sleep_seconds", interrupted)
    with server(growing) as url:
        status, said, _ = run(url, "--out", out, "--seconds", 1000)
    assert (status, said) == (0, f"ended early: 2 intervals in {out}")
    assert len(read_trace(out).intervals) == 2


def test_ctrl_c_before_anything_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(record_module, "sleep_seconds", interrupted)
    with server(growing) as url:
        status, _, problem = run(url, "--out", tmp_path / "trace.jsonl", "--seconds", 1000)
    assert status == 1
    assert "nothing was recorded" in problem
    assert not list(tmp_path.iterdir())


def test_a_look_that_takes_long_is_not_followed_by_hasty_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(record_module, "monotonic_seconds", lambda: now[0])
    monkeypatch.setattr(record_module, "sleep_seconds", lambda seconds: now.__setitem__(0, now[0] + seconds))

    def slow(look: int) -> str:
        now[0] += 35.0 if look == 1 else 0.0
        return growing(look)

    out = tmp_path / "trace.jsonl"
    with server(slow) as url:
        status, _, _ = run(url, "--out", out, "--seconds", 60)
    assert status == 0
    assert [one.at for one in read_trace(out).intervals] == [0, 45, 50]


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        (lambda _: 404, "it answers 404 Not Found; are its metrics on?"),
        (lambda _: "hello\n", "not metrics in the text format of Prometheus"),
        (lambda _: "up 1\n", "not the metrics of a vLLM server: vllm:request_success_total is missing"),
    ],
)
def test_what_is_no_server_of_vllm_is_said_to_be(tmp_path: Path, pages: Any, said: str) -> None:
    with server(pages) as url:
        status, _, problem = run(url, "--out", tmp_path / "trace.jsonl", "--seconds", 10)
    assert (status, said in problem) == (1, True), problem
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "more", "said"),
    [
        ("file:///etc/passwd", (), "URL must be like http://localhost:8000"),
        ("localhost:8000", (), "URL must be like http://localhost:8000"),
        ("http://localhost:x", (), "URL must be like http://localhost:8000"),
        ("http://127.0.0.1:1", ("--seconds", 0), "--seconds and --interval must be 0.1 or more"),
        ("http://127.0.0.1:1", ("--interval", "nan"), "--seconds and --interval must be 0.1 or more"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused(tmp_path: Path, url: str, more: tuple[Any, ...], said: str) -> None:
    status, _, problem = run(url, "--out", tmp_path / "trace.jsonl", "--seconds", 10, *more)
    assert (status, said in problem) == (2, True), problem


def test_a_recording_is_never_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    out.write_text("precious")
    status, _, problem = run("http://127.0.0.1:1", "--out", out, "--seconds", 10)
    assert status == 2
    assert "exists already" in problem
    assert out.read_text() == "precious"


def test_a_folder_that_is_not_there_is_said_to_be(tmp_path: Path) -> None:
    with server(growing) as url:
        status, _, problem = run(url, "--out", tmp_path / "no" / "trace.jsonl", "--seconds", 10)
    assert status == 2
    assert "No such file or directory" in problem

"""`vllm-omni-sched import --metrics`: counters of a server become a trace that can be replayed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.vllm_page import page
from tests.unit.cli.test_record import server
from vllm_omni_sched.cli import app
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.replay import Replay, TraceOptions
from vllm_omni_sched.sim.workloads.trace import read_trace

PROMPTS, OUTPUTS = [40] * 300 + [900] * 100, [7] * 400
SERVED = (
    "# TYPE vllm:prefix_cache_queries_total counter\n"
    'vllm:prefix_cache_queries_total{engine="0"} 1000.0\n'
    "# TYPE vllm:prefix_cache_hits_total counter\n"
    'vllm:prefix_cache_hits_total{engine="0"} 250.0\n'
    "# TYPE vllm:spec_decode_num_drafts_total counter\n"
    'vllm:spec_decode_num_drafts_total{engine="0"} 100.0\n'
    "# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter\n"
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 70.0\n'
    'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 40.0\n'
)


def a_page(number: int = 400, **more: float) -> str:
    return page(finished={"stop": number}, prompts=PROMPTS[-number:], outputs=OUTPUTS[-number:], **more)


def written(path: Path, text: str, at: float) -> Path:
    path.write_text(text)
    os.utime(path, (at, at))
    return path


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["import", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


def test_a_page_covers_the_time_since_the_server_started(tmp_path: Path) -> None:
    file, out = written(tmp_path / "metrics.txt", a_page(started=100.0) + SERVED, 900.0), tmp_path / "trace.jsonl"
    status, said = run("--metrics", file, "--out", out)
    assert status == 0, said
    assert said.startswith(f"1800 requests in 3600 s in {out}, drawn at each replay: 0.5 a second")
    assert "- bursts, and the course of a day" in said
    assert "prefix cache had 25% of the prompt tokens" in said
    assert "accepted 70% of its first draft tokens: plan with --speculation ...,acceptance=0.7" in said
    trace = read_trace(out)
    assert (len(trace.intervals), trace.arrivals, trace.seconds) == (1, 1800, 3600.0)
    assert not trace.intervals[0].restarted
    drawn = list(requests(Replay(trace, TraceOptions(file="trace")), 1))
    assert len(drawn) == 1800
    tokens = np.array([one.prompt_tokens for one in drawn])
    assert np.mean(tokens > 500) == pytest.approx(0.25, abs=0.04)
    assert np.mean(tokens) == pytest.approx(np.mean(PROMPTS), rel=0.15)


def test_two_pages_are_the_time_between_them(tmp_path: Path) -> None:
    first = written(tmp_path / "first.txt", a_page(100), 1000.0)
    second = written(tmp_path / "second.txt", a_page(400, running=20), 1100.0)
    out = tmp_path / "trace.jsonl"
    status, said = run("--metrics", first, "--metrics", second, "--out", out, "--seconds", 60)
    assert status == 0, said
    # 300 have finished, and 20 more have come
    assert said.startswith(f"192 requests in 60 s in {out}, drawn at each replay: 3.2 a second, the mean over 100 s")
    assert read_trace(out).intervals[0].finished == 300


def test_a_server_is_asked_itself(tmp_path: Path) -> None:
    out = tmp_path / "trace.jsonl"
    with server(lambda look: a_page()) as address:
        status, said = run("--metrics", address, "--out", out, "--over", 200)
    assert status == 0, said
    assert "2 a second, the mean over 200 s" in said
    assert read_trace(out).header.source == "/metrics of 127.0.0.1"


def test_a_server_that_is_gone_is_a_problem(tmp_path: Path) -> None:
    with server(lambda look: 503) as address:
        status, said = run("--metrics", address, "--out", tmp_path / "trace.jsonl")
    assert status == 1
    assert "it answers 503" in said


@pytest.mark.parametrize(
    ("text", "at", "more", "said"),
    [
        ("no metrics\n", 900.0, (), "not metrics in the text format of Prometheus"),
        (a_page(0), 900.0, (), "no request has finished yet: look again later"),
        (a_page(), 50.0, (), "it is not known how long the counters cover: give --over SECONDS"),
        (a_page(), 900.0, ("--seconds", 0.1), "make none in 0.1 s: raise --seconds"),
        (a_page(), 900.0, ("--over", -1), "--seconds must be above 0, and --over 0 or more"),
        (a_page(), 900.0, ("--format", "azure"), "--metrics takes the place of a trace"),
        (a_page(), 900.0, ("--metrics", "no such file"), "--metrics no such file: No such file or directory"),
        (a_page(), 900.0, ("--metrics", "a", "--metrics", "b"), "at most two pages"),
        (a_page(), 900.0, ("--metrics", "http://"), "--metrics: URL must be like http://localhost:8000"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, at: float, more: tuple[object, ...], said: str) -> None:
    file, out = written(tmp_path / "metrics.txt", text, at), tmp_path / "trace.jsonl"
    status, printed = run("--metrics", file, "--out", out, *more)
    assert status == 2, printed
    assert said in printed
    assert not out.exists()


def test_a_restart_between_two_pages_is_said(tmp_path: Path) -> None:
    pages = [written(tmp_path / name, a_page(number), at) for name, number, at in (("a", 400, 1.0), ("b", 100, 9.0))]
    status, said = run("--metrics", pages[0], "--metrics", pages[1], "--out", tmp_path / "trace.jsonl")
    assert status == 2
    assert "the server has restarted between the two scrapes" in said


def test_either_a_trace_or_a_server_is_named(tmp_path: Path) -> None:
    status, said = run("--out", tmp_path / "trace.jsonl")
    assert status == 2
    assert "name a trace and its --format, or a server with --metrics" in said


def test_names_are_those_of_vllm() -> None:
    """Without importing it, which takes long."""
    from importlib.util import find_spec

    folder = find_spec("vllm").submodule_search_locations[0]  # type: ignore[union-attr, index]
    text = "".join((Path(folder) / file).read_text() for file in ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py"))
    for name in ("prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_drafts",
                 "spec_decode_num_accepted_tokens_per_pos"):  # fmt: skip
        assert f'"vllm:{name}"' in text
    assert '"position"' in text

"""Traces that can be opened: they parse, and are bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_sched.sim.output import Spans


def events(spans: Spans, folder: Path) -> list[dict[str, Any]]:
    path = folder / "trace.json"
    spans.write(path)
    assert [one.name for one in folder.iterdir()] == ["trace.json"]
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


def test_stages_are_processes_and_replicas_threads(tmp_path: Path) -> None:
    spans = Spans()
    spans.span("video", 1, "decode", 1.5, 0.25, {"frames": 30})
    spans.span("llm", 0, "request 7", 2.0, 3.0)
    found = events(spans, tmp_path)
    names = {(one["name"], one["args"]["name"]) for one in found if one["ph"] == "M"}
    assert names == {
        ("process_name", "video (simulated)"),
        ("process_name", "llm (simulated)"),
        ("thread_name", "replica 1"),
        ("thread_name", "replica 0"),
    }
    work = next(one for one in found if one["ph"] == "X")
    assert (work["ts"], work["dur"], work["args"]) == (1.5e6, 0.25e6, {"frames": 30})
    begin, end = (next(one for one in found if one["ph"] == ph) for ph in "be")
    assert (begin["ts"], end["ts"], begin["id"]) == (2e6, 5e6, end["id"])
    assert begin["pid"] == end["pid"] != work["pid"]


def test_it_is_bounded_in_time_and_number() -> None:
    spans = Spans(until=10.0, most=3)
    for at in (9.0, 10.0, 11.0, 1.0, 2.0, 3.0, 4.0):
        spans.span("llm", 0, "step", at, 1.0)
    assert (len(spans), spans.dropped) == (3, 2)
    assert not spans.wants(1.0)
    assert not Spans(until=10.0).wants(10.0)


def test_a_trace_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("old")
    spans = Spans()
    spans.span("llm", 0, "step", 0.0, 1.0, {"what": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        spans.write(tmp_path / "trace.json")
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"trace.json": "old"}

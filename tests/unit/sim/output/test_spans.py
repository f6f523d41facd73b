"""Traces that can be opened: they parse, nest, and are bounded."""

from __future__ import annotations

import json
import random
from collections import defaultdict
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


def test_spans_nest_on_every_thread(tmp_path: Path) -> None:
    rng = random.Random(5)
    spans = Spans()
    for number in range(400):
        spans.span("llm", rng.randrange(3), f"r{number}", rng.random() * 10, rng.choice([0.0, rng.random()]))
    on_thread = defaultdict(list)
    for event in events(spans, tmp_path):
        if event["ph"] == "X":
            on_thread[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, on_thread.values())) == 400
    for held in on_thread.values():
        for at, (start, end) in enumerate(held):
            for other_start, other_end in held[at + 1 :]:
                apart = end <= other_start + 1e-6 or other_end <= start + 1e-6
                inside = (start - 1e-6 <= other_start and other_end <= end + 1e-6) or (
                    other_start - 1e-6 <= start and end <= other_end + 1e-6
                )
                assert apart or inside


def test_what_nests_shares_a_thread_and_what_overlaps_does_not(tmp_path: Path) -> None:
    spans = Spans()
    spans.span("llm", 0, "inner", 0.2, 0.1)  # told before what it lies in
    spans.span("llm", 0, "outer", 0.0, 1.0)
    spans.span("llm", 0, "first", 0.0, 0.1)  # begins with the outer one, and is told after it
    spans.span("llm", 0, "zero", 0.0, 0.0)
    spans.span("llm", 0, "inner first", 2.0, 0.1)
    spans.span("llm", 0, "outer second", 2.0, 1.0)
    spans.span("llm", 0, "across", 0.9, 0.5)
    spans.span("llm", 0, "encode", 0.0, 1.0, track="lane")
    tid = {event["name"]: event.get("tid") for event in events(spans, tmp_path) if event["ph"] == "X"}
    assert tid["inner"] == tid["outer"] == tid["first"] == tid["zero"]
    assert tid["inner first"] == tid["outer second"]
    assert len({tid["outer"], tid["across"], tid["encode"]}) == 3


def test_stages_are_processes_and_replicas_threads(tmp_path: Path) -> None:
    spans = Spans()
    spans.span("video", 1, "decode", 1.5, 0.25, {"frames": 30})
    spans.counter("llm", "queued", 2.0, 7)
    found = events(spans, tmp_path)
    names = {(one["name"], one["args"]["name"]) for one in found if one["ph"] == "M"}
    assert names == {
        ("process_name", "video (simulated)"),
        ("process_name", "llm (simulated)"),
        ("thread_name", "replica 1"),
    }
    span = next(one for one in found if one["ph"] == "X")
    assert (span["ts"], span["dur"], span["args"]) == (1.5e6, 0.25e6, {"frames": 30})
    counter = next(one for one in found if one["ph"] == "C")
    assert (counter["ts"], counter["args"]) == (2e6, {"queued": 7})
    assert counter["pid"] != span["pid"]


def test_it_is_bounded_in_time_and_number() -> None:
    spans = Spans(until=10.0, most=3)
    for at in (9.0, 10.0, 11.0, 1.0, 2.0, 3.0, 4.0):
        spans.span("llm", 0, "step", at, 1.0)
    assert (len(spans), spans.dropped) == (3, 2)
    assert not spans.wants(1.0)
    assert not Spans(until=10.0).wants(10.0)


def test_a_negative_time_is_a_defect() -> None:
    with pytest.raises(ValueError, match="takes -1"):
        Spans().span("llm", 0, "step", 3.0, -1.0)


def test_a_trace_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("old")
    spans = Spans()
    spans.span("llm", 0, "step", 0.0, 1.0, {"what": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        spans.write(tmp_path / "trace.json")
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == {"trace.json": "old"}

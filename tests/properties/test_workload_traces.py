"""Traces: what is written is what is read, what is replayed is what was recorded, and no damage goes unseen."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.replay import Replay, TraceOptions
from vllm_omni_sched.sim.workloads.trace import (
    FORMAT,
    VERSION,
    Exact,
    Header,
    Interval,
    Tokens,
    Trace,
    read_trace,
    write_trace,
)

HEADER = Header(FORMAT, VERSION, 10.0, "a test")
NAMES = st.sampled_from(["image", "video", "audio", "unknown"])


@st.composite
def tokens(draw: st.DrawFn) -> Tokens:
    bounds = sorted(draw(st.sets(st.integers(1, 10_000), max_size=5)))
    buckets = [(float(bound), draw(st.integers(0, 20))) for bound in bounds]
    if bounds and draw(st.booleans()):
        buckets.append((None, draw(st.integers(0, 3))))
    return Tokens(tuple(buckets), float(draw(st.integers(0, 100_000))))


@st.composite
def intervals(draw: st.DrawFn) -> list[Interval]:
    found, at = [], 0.0
    for _ in range(draw(st.integers(1, 5))):
        seconds = draw(st.sampled_from([0.5, 10.0, 37.25]))
        items = draw(st.dictionaries(NAMES, st.integers(0, 30), max_size=2))
        classes = draw(st.dictionaries(st.sampled_from(["batch", "interactive"]), st.integers(0, 9)))
        cv = draw(st.none() | st.floats(0.1, 5))
        counts = draw(st.tuples(st.integers(0, 30), st.integers(0, 30)))
        found.append(
            Interval(at, seconds, *counts, draw(tokens()), draw(tokens()), items=items, classes=classes, cv=cv)
        )
        at += seconds
    return found


@st.composite
def exact(draw: st.DrawFn) -> list[Exact]:
    times = sorted(draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=8)))
    item = st.tuples(NAMES, st.integers(0, 4000))
    numbers = st.integers(0, 5000)
    return [
        Exact(at, draw(numbers), 1 + draw(numbers), tuple(draw(st.lists(item, max_size=3))), "batch", draw(numbers))
        for at in times
    ]


@given(st.one_of(intervals(), exact()))
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(entries: list[Interval] | list[Exact]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        write_trace(path, HEADER, entries)
        if not sum(getattr(one, "arrivals", 1) for one in entries):
            with pytest.raises(ConfigError, match="no request"):
                read_trace(path)
            return
        trace = read_trace(path)
        assert [*trace.intervals, *trace.requests] == entries
        assert trace.header == HEADER


@given(intervals(), st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 60), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_a_replay_has_what_was_recorded(found: list[Interval], scale: float, embeds: int, seed: int) -> None:
    if not sum(one.arrivals for one in found):
        return
    options = TraceOptions(file="x", scale=scale, item_embeds=embeds)
    replayed = list(requests(Replay(Trace(HEADER, tuple(found)), options), seed))
    assert [one.arrival for one in replayed] == sorted(one.arrival for one in replayed)
    expected = 0.0
    for number, interval in enumerate(found, 1):
        expected += scale * interval.arrivals
        end = interval.at + interval.seconds
        # each is rounded to a whole number; one that comes at the end may be of the next
        assert sum(one.arrival < end for one in replayed) < expected + number
        assert sum(one.arrival <= end for one in replayed) > expected - number
    largest = max([1.0] + [2 * (bound or 0.0) for one in found for bound, _ in one.prompt_tokens.buckets])
    for one in replayed:
        assert 1 <= one.prompt_tokens <= max(largest, 1.0)
        assert {item.embeds for item in one.items} <= {embeds}


@given(exact(), st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_a_file_that_is_cut_anywhere_is_refused_or_whole_lines(entries: list[Exact], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.jsonl")
        write_trace(path, HEADER, entries)
        data = path.read_bytes()
        kept = data[: max(0, len(data) - cut)]
        path.write_bytes(kept)
        whole = kept.count(b"\n") - 1
        if kept.endswith(b"\n") and whole > 0:
            assert list(read_trace(path).requests) == entries[:whole]
            return
        with pytest.raises(ConfigError) as caught:
            read_trace(path)
        assert str(caught.value).startswith(str(path))

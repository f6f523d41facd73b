"""The trace format: what is read, and what is refused with file and line."""

import json
from pathlib import Path

import msgspec
import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.trace import (
    FORMAT,
    VERSION,
    Exact,
    Header,
    Interval,
    Tokens,
    TraceWriter,
    read_trace,
    write_trace,
)

HEADER = {"format": FORMAT, "version": VERSION, "interval_seconds": 10.0, "source": "a test", "begins": ""}
FIRST = {"kind": "interval", "at": 0.0, "seconds": 10.0, "arrivals": 3}
SECOND = {"kind": "interval", "at": 10.0, "seconds": 10.0, "arrivals": 0}
REQUEST = {"kind": "request", "at": 1.5, "text_tokens": 7, "output_tokens": 9, "items": [["image", 576]]}


def written(folder: Path, *lines: object, end: str = "\n") -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
    return path


def test_intervals_are_read(tmp_path):
    tokens = {"buckets": [[100, 0], [200, 2], [None, 1]], "total": 700.5}
    more = {"prompt_tokens": tokens, "finished": 3, "items": {"image": 4}, "classes": {"batch": 2}, "cv": 2.0}
    trace = read_trace(written(tmp_path, HEADER, {**FIRST, **more}, SECOND))
    assert trace.header == Header(FORMAT, VERSION, 10.0, "a test")
    assert (trace.seconds, trace.arrivals, trace.requests) == (20.0, 3, ())
    first = trace.intervals[0]
    assert first.prompt_tokens == Tokens(((100, 0), (200, 2), (None, 1)), 700.5)
    assert first.prompt_tokens.requests == 3
    assert (first.items, first.classes, first.cv, first.restarted) == ({"image": 4}, {"batch": 2}, 2.0, False)


def test_requests_are_read(tmp_path):
    trace = read_trace(written(tmp_path, HEADER, REQUEST, {**REQUEST, "at": 1.5, "items": []}))
    assert trace.requests[0] == Exact(1.5, 7, 9, (("image", 576),))
    assert (len(trace.requests), trace.arrivals, trace.intervals) == (2, 2, ())
    assert trace.seconds == pytest.approx(2.25)  # and a mean gap


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["x"], "line 1: not JSON"),
        ([{"version": 1}], "line 1: not a trace: its first line must have"),
        ([{**HEADER, "version": 2}, FIRST], "line 1: version 2 of the format is not supported; this release reads 1"),
        ([HEADER], "the trace has no requests"),
        ([HEADER, FIRST, "{"], "line 3: not JSON"),
        ([HEADER, {**FIRST, "at": 1.0}], "line 2: the first interval must begin at 0, got 1"),
        ([HEADER, FIRST, {**SECOND, "at": 20.0}], "line 3: there is a gap of 10 s before it"),
        ([HEADER, FIRST, {**SECOND, "at": 5.0}], "line 3: at is 5, before 10, where the previous interval ends"),
        ([HEADER, {**FIRST, "arrivals": -1}], r"line 2: Expected `int` >= 0 - at `\$.arrivals`"),
        ([HEADER, {**FIRST, "prompt": "hello"}], "line 2: Object contains unknown field `prompt`"),
        ([HEADER, {**FIRST, "prompt_tokens": {"buckets": [[5, 1], [5, 1]]}}], "line 2: prompt_tokens: the bounds"),
        ([HEADER, {**FIRST, "kind": "step"}], r"line 2: Invalid value 'step' - at `\$.kind`, which must be"),
        ([HEADER, FIRST, REQUEST], "line 3: a trace has intervals or requests, never both"),
        ([HEADER, REQUEST, {**REQUEST, "at": 1.0}], "line 3: at is 1, before that of the line above, 1.5"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_line(tmp_path, lines, said):
    path = written(tmp_path, *lines)
    with pytest.raises(ConfigError, match=said) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))


def test_a_cut_off_line_is_no_line(tmp_path):
    with pytest.raises(ConfigError, match="line 3: the last line is incomplete"):
        read_trace(written(tmp_path, HEADER, FIRST, json.dumps(SECOND)[:-9], end=""))
    with pytest.raises(ConfigError, match="line 2: the last line is incomplete"):
        read_trace(written(tmp_path, HEADER, FIRST, end=""))


def test_an_empty_file_and_no_file_are_said_to_be(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.touch()
    with pytest.raises(ConfigError, match="line 1: the file is empty"):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)


def test_a_trace_is_there_when_it_is_whole(tmp_path):
    path = tmp_path / "out.jsonl"
    writer = TraceWriter(path, Header(FORMAT, VERSION))
    writer.add(Interval(0.0, 10.0, 3))
    assert not path.exists()
    assert writer.close()
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]
    assert read_trace(path).arrivals == 3


def test_a_trace_without_lines_leaves_no_file(tmp_path):
    assert not TraceWriter(tmp_path / "out.jsonl", Header(FORMAT, VERSION)).close()
    assert not list(tmp_path.iterdir())


def test_a_trace_that_fails_in_the_middle_keeps_whole_lines(tmp_path):
    def entries():
        yield Exact(0.0, 1, 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_trace(tmp_path / "out.jsonl", Header(FORMAT, VERSION), entries())
    assert len(read_trace(tmp_path / "out.jsonl").requests) == 1


def test_no_field_of_a_line_can_hold_content_or_an_id():
    """All text there is: names of modalities and classes."""
    free = {
        (kind.__name__, field.name)
        for kind in (Interval, Exact, Tokens)
        for field in msgspec.structs.fields(kind)
        if "str" in str(field.type)
    }
    assert free == {("Interval", "items"), ("Interval", "classes"), ("Exact", "items"), ("Exact", "sla")}

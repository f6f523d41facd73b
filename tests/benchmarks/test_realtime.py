"""The realtime benchmark without an engine: options, the meter, the profile, the picture."""

import pytest

from benchmarks.realtime import plot, profile
from benchmarks.realtime.__main__ import kv_cache_gib, parse, table


def bucket(frames, seconds):
    return {
        "frames": frames,
        "seconds_per_frame": {"median": seconds, "p99": 2 * seconds, "mean": seconds},
        "cpu_seconds_per_frame": {"client": 0.001, "engine core": 0.002, "worker": 0.003},
        "rss_bytes": {"client": 1 << 20, "engine core": 2 << 20, "worker": 3 << 20},
    }


def outcome(variant, sessions, *buckets):
    return {"variant": variant, "sessions": sessions, "buckets": list(buckets), "stopped_early": False}


RUNS = [
    outcome("stock", 1, bucket(250, 0.02), bucket(500, 0.09)),
    outcome("ours", 1, *(bucket(250 * i, 0.006) for i in range(1, 9))),
    outcome("ours", 8, bucket(250, 0.03)),
]


def test_one_number_of_frames_serves_all_sessions():
    assert parse(["--frames", "500", "--sessions", "1,8"]).frames == [500, 500]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(["--frames", "1,2", "--sessions", "1,2,3"], "one for each"), (["--variants", "hours"], "there are stock, ours")],
)
def test_bad_options_are_refused(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert complaint in capsys.readouterr().err


def test_the_kv_cache_holds_every_session_whole():
    assert kv_cache_gib(1, 1) == 2
    assert kv_cache_gib(32768, 8) == 3


def test_the_table_shows_quarters_of_a_run():
    shown = table(RUNS)
    assert shown.row_count == 2 + 4 + 1
    assert list(shown.columns[2].cells) == ["250", "500", "500", "1,000", "1,500", "2,000", "250"]
    assert next(iter(shown.columns[5].cells)) == "1.0 / 2.0 / 3.0"


def test_a_picture_is_drawn(tmp_path):
    assert plot.draw(tmp_path / "x.png", RUNS, "0.32.0").read_bytes().startswith(b"\x89PNG")


STACKS = """\
run (a/core.py:1);step (a/core.py:10);strip (m/utils.py:3) 6
run (a/core.py:1);step (a/core.py:12);strip (m/utils.py:4) 2
run (a/core.py:1);step (a/core.py:12);Connection._recv (multiprocessing/connection.py:9) 90
run (a/core.py:1) 2
"""


def test_a_profile_adds_up_lines_of_a_function_and_leaves_waiting_out():
    found = profile.summarise(STACKS.splitlines(), seconds=0.2)
    assert found.samples == 10
    assert found.busy == 0.5  # 10 of the 20 samples that one thread can have
    assert found.own == [("strip (m/utils.py)", 0.8), ("run (a/core.py)", 0.2)]
    assert dict(found.inclusive)["step (a/core.py)"] == 0.8


def test_a_profile_of_an_idle_process_is_empty():
    assert profile.summarise(["run (a.py:1);Condition.wait (threading.py:1) 9"], seconds=1).own == []


def test_the_meter_reports_whole_buckets_and_forgets_them(monkeypatch):
    pytest.importorskip("vllm")
    from benchmarks.harness.processes import ProcessTree, Usage
    from benchmarks.realtime import session

    reported = []
    monkeypatch.setattr(session, "emit", lambda kind, **fields: reported.append((kind, fields)))
    tree = ProcessTree()
    monkeypatch.setattr(tree, "usage", lambda: {"client": Usage(1.0, 7)})
    meter = session.Meter(sessions=2, bucket=3, tree=tree)
    for _ in range(7):
        meter.frame(0)
        meter.frame(1)
    assert [(kind, fields["frames"]) for kind, fields in reported] == [("bucket", 3), ("bucket", 6)]
    assert reported[0][1]["rss_bytes"] == {"client": 7}
    assert len(meter.intervals) == 3  # since the last bucket: one of session 0, two of session 1

"""The overhead benchmark without an engine: what is made of the rounds."""

import json

import pytest

from benchmarks.overhead import __main__ as overhead
from benchmarks.overhead.__main__ import METRICS, parse, record, statement, table, why_enough


def answer(speed):
    return {
        "tokens_per_second": speed,
        "itl_seconds": {"median": 1 / speed, "p99": 2 / speed},
        "ttft_seconds": 3 / speed,
        "cpu_seconds_per_token": {"client": 1e-6, "engine core": 2e-6, "worker": 3e-6},
    }


ROUNDS = {
    "stock": [answer(1000.0), answer(500.0), answer(800.0)],  # the second round met a busy machine
    "installed": [answer(1000.0), answer(500.0), answer(800.0)],
    "ours": [answer(990.0), answer(495.0), answer(792.0)],
}


def test_the_ratio_is_taken_round_by_round():
    speeds = {r["variant"]: r for r in record(ROUNDS) if r["metric"] == "tokens / s"}
    assert speeds["ours"]["ratio_to_stock"] == pytest.approx(0.99)
    assert speeds["ours"]["median"] == 792.0
    assert speeds["ours"]["ratio_interval"] == [0.99, 0.99]
    assert speeds["ours"]["statement"] == "differs from stock: -1.0% to -1.0%"
    assert speeds["installed"]["ratio_to_stock"] == 1.0
    assert speeds["installed"]["statement"] == "no difference seen; at most 0.0%"
    assert {one["samples"] for one in record(ROUNDS)} == {3}


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((0.99, 1.02), "no difference seen; at most 2.0%"),
        ((0.96, 1.01), "no difference seen; at most 4.0%"),
        ((0.9, 1.2), "not decided: -10.0% to +20.0%"),
        ((1.01, 3.8), "differs from stock: +1.0% to +280.0%"),
        ((0.9, 0.99), "differs from stock: -10.0% to -1.0%"),
    ],
)
def test_no_difference_is_said_only_where_the_interval_is_narrow_and_holds_one(interval, said):
    assert statement(*interval) == said


def test_a_run_goes_on_until_its_intervals_are_narrow_or_its_time_is_over():
    options = parse(["--min-rounds", "5", "--max-rounds", "40", "--seconds", "100"])
    narrow = {variant: [answer(1000.0 + turn % 3) for turn in range(10)] for variant in ROUNDS}
    wide = narrow | {"ours": [answer(1000.0 + 300 * (turn % 3)) for turn in range(10)]}
    assert why_enough(narrow, 10, 50, options) == "every interval was narrow enough"
    assert why_enough(wide, 10, 50, options) == ""
    assert why_enough(narrow, 4, 50, options) == ""
    assert why_enough(wide, 10, 101, options) == "the time was over"
    assert why_enough(wide, 40, 50, options) == "all rounds were run"


def test_cpu_time_is_summed_over_processes():
    assert METRICS["CPU µs / token, all processes"](answer(1.0)) == pytest.approx(6.0)
    assert METRICS["CPU µs / token, engine core"](answer(1.0)) == pytest.approx(2.0)


def test_the_table_has_a_line_per_metric():
    shown = table(ROUNDS, "0.32.0")
    assert list(shown.columns[0].cells) == list(METRICS)
    assert next(iter(shown.columns[5].cells)) == "0.990 [0.990, 0.990]"


class Engine:
    """Answers as the subprocess of one variant does; every third round takes longer."""

    def __init__(self):
        self.rounds = 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def next_event(self):
        return {"kind": "up", "vllm": "0.33.0"}

    def ask(self, **request):
        self.rounds += 1
        return {"kind": "round", **answer(1000.0 + self.rounds % 3)}


def test_a_run_leaves_its_rounds_and_why_it_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(overhead, "start", lambda *_: Engine())
    overhead.main(["--model", "x", "--min-rounds", "10", "--warm-up", "1", "--out", str(tmp_path)])
    left = json.loads((tmp_path / "overhead-0.33.0.json").read_text())
    assert left["provenance"]["workload"]["rounds"] == 10
    assert left["provenance"]["workload"]["ended"] == "every interval was narrow enough"
    assert {one["samples"] for one in left["results"]} == {10}
    assert all(one["statement"].startswith("no difference seen") for one in left["results"] if "statement" in one)

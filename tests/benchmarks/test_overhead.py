"""The overhead benchmark without an engine: what is made of the rounds."""

import pytest

from benchmarks.overhead.__main__ import METRICS, record, table


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
    assert speeds["installed"]["ratio_to_stock"] == 1.0


def test_cpu_time_is_summed_over_processes():
    assert METRICS["CPU µs / token, all processes"](answer(1.0)) == pytest.approx(6.0)
    assert METRICS["CPU µs / token, engine core"](answer(1.0)) == pytest.approx(2.0)


def test_the_table_has_a_line_per_metric():
    shown = table(ROUNDS, "0.32.0")
    assert list(shown.columns[0].cells) == list(METRICS)
    assert next(iter(shown.columns[5].cells)) == "0.990"

"""The overhead benchmark without an engine: what is made of the rounds."""

import pytest

from benchmarks.overhead.__main__ import record, statement


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

"""`mixed` without an engine: arrivals, and what is made of the rounds."""

import pytest

from benchmarks.mixed.plot import draw
from benchmarks.mixed.pooled import pooled
from benchmarks.mixed.report import measures, record, same_tokens


def request(kind, at, ttft, gaps=(), digest="same", **more):
    return {"kind": kind, "at": at, "ttft": ttft, "gaps": list(gaps), "tokens": 1 + len(gaps), "digest": digest, **more}


def answer(stall, digest="same"):
    """Text tokens each 10 ms but for one gap, while an image waits from 10.0 to 10.0 + stall + 0.1."""
    return {
        "seconds": 10.0,
        "requests": [
            request("text", 9.0, 0.9, [0.01] * 10 + [stall] + [0.01] * 9),
            request("image", 10.0, stall + 0.1, [0.01], digest),
            request("session", 9.0, 0.02, latencies=[0.02, 0.04]),
        ],
    }


def test_a_stall_costs_the_slo():
    assert measures(answer(0.05))["within SLO %"] == 100.0
    assert measures(answer(0.4))["within SLO %"] == pytest.approx(200 / 3)
    found = measures(answer(0.4))
    assert found["text ITL max"] == 400.0
    assert found["image TTFT P50"] == pytest.approx(500.0)
    assert found["session P50"] == pytest.approx(30.0)
    assert found["tokens / s"] == pytest.approx(2.4)


def test_ratios_are_of_pooled_values_and_intervals_are_over_pairs_of_rounds():
    rounds, base = [answer(0.1), answer(0.3)], [answer(0.2), answer(0.6)]
    found = {one["measure"].split(",")[0]: one for one in pooled(rounds, base)}
    assert found["image TTFT P50"]["median"] == pytest.approx(300.0)
    assert found["image TTFT P50"]["ratio"] == pytest.approx(0.3 / 0.5)
    low, high = found["image TTFT P50"]["ratio_interval"]
    assert (low, high) == (pytest.approx(0.4 / 0.7), pytest.approx(0.2 / 0.3))  # either round alone
    assert (found["session P50"]["median"], found["session P50"]["ratio"]) == (pytest.approx(30.0), 1.0)
    nobody = {"seconds": 1.0, "requests": []}
    assert [one["measure"].split(",")[0] for one in pooled([nobody], [nobody])] == ["tokens / s"]
    assert all("ratio" not in one for one in pooled(base, base))


def test_records_hold_medians_and_whether_tokens_are_the_same(tmp_path):
    answers = {
        ("stock", 0.5): [answer(0.4), answer(0.6), answer(0.5)],
        ("ours", 0.5): [answer(0.02), answer(0.03, "other"), answer(0.01)],
        ("stock", 1.0): [answer(0.4)],
        ("ours", 1.0): [answer(0.02)],
    }
    assert same_tokens(answers, 0.5, ["stock", "ours"]).count(False) == 1
    records = {(r["variant"], r["load"], r["measure"]): r for r in record(answers)}
    assert records["stock", 0.5, "text ITL max"]["median"] == 500.0
    together = records["stock", 0.5, "within SLO %, all rounds together"]
    assert (together["median"], together["samples"]) == (pytest.approx(200 / 3, abs=1e-2), 9)
    tail = records["ours", 0.5, "image TTFT P99, all rounds together"]
    assert tail["ratio"] == pytest.approx((0.13 - 0.02 * 0.01) / (0.7 - 0.02 * 0.1), abs=1e-3)
    assert tail["ratio_interval"][0] <= tail["ratio"] <= tail["ratio_interval"][1]
    assert "ratio" not in records["stock", 0.5, "image TTFT P99, all rounds together"]
    assert records["ours", 0.5, "requests with the tokens of stock %"]["samples"] == 9
    assert draw(tmp_path / "mixed.png", list(records.values())).stat().st_size > 10_000
    assert draw(tmp_path / "none.png", [r for r in records.values() if r["load"] == 1.0]) is None

"""`mixed` without an engine: arrivals, and what is made of the rounds."""

from collections import Counter

import pytest

from benchmarks.mixed.__main__ import _ranks, parse
from benchmarks.mixed.plot import draw
from benchmarks.mixed.pooled import gaps_beside, pooled
from benchmarks.mixed.report import measures, record, same_tokens
from benchmarks.mixed.workload import arrivals


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


def test_gaps_beside_images_are_those_in_which_one_waits():
    text, image, _ = answer(0.4)["requests"]
    beside = gaps_beside([text], [image])
    assert max(beside) == 0.4
    assert 10 <= len(beside) <= 12  # the stall, and what follows within 0.1 s
    assert gaps_beside([text], []) == []


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


def test_rounds_that_not_all_variants_have_ended_are_not_recorded():
    answers = {
        ("stock", 1.0): [answer(0.4)] * 2,
        ("ours", 1.0): [answer(0.1)] * 2,
        ("stock", 2.0): [answer(0.4)] * 2,
        ("ours", 2.0): [answer(0.1)],  # interrupted
        ("ours", 3.0): [answer(0.1)],
    }
    found = [r for r in record(answers) if r["measure"] == "text ITL max"]
    samples = {(r["variant"], r["load"]): r["samples"] for r in found}
    assert samples == {("stock", 1.0): 2, ("ours", 1.0): 2, ("stock", 2.0): 1, ("ours", 2.0): 1}


def test_a_variant_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        parse(["--variants", "stock,our"])
    assert "unknown variant 'our'; there are stock, stock on all cores, ours" in capsys.readouterr().err


def test_the_same_seed_gives_the_same_arrivals_and_load_scales_them():
    assert arrivals(0.5, 60, 3) == arrivals(0.5, 60, 3) != arrivals(0.5, 60, 4)
    assert len(arrivals(2.0, 200, 0)) > 3 * len(arrivals(0.5, 200, 0))
    (frames,) = [a for a in arrivals(0.5, 20, 0, frames=32) if len(a.image_seeds) == 32]
    drawn = Counter(seed for a in arrivals(2.0, 200, 0, pictures=4) for seed in a.image_seeds)
    assert [number for number, _ in drawn.most_common()] == [0, 1, 2, 3]
    assert frames.at == 10.0


def test_a_round_without_text_or_without_any_request_has_no_measures_of_them():
    assert measures({"requests": [], "seconds": 1.0}) == {}
    image = {"kind": "image", "ttft": 0.5, "at": 0.1, "gaps": [], "tokens": 1}
    found = measures({"requests": [image], "seconds": 1.0})
    assert found["image TTFT P50"] == 500.0
    assert "text ITL P50" not in found


def test_each_rank_has_its_own_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {1, 3, 5, 7})
    assert _ranks(1) == {}
    assert _ranks(2) == {"VLLM_CPU_OMP_THREADS_BIND": "1,3|5,7"}
    with pytest.raises(SystemExit, match="at least 5 processors; this machine has 4"):
        _ranks(5)

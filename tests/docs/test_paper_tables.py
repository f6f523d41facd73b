"""Tables of the studies: the number in the cell is the number in the file."""

import importlib
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
paper_tables = importlib.import_module("paper_tables")
sys.path.remove(str(DOCS))

PROVENANCE = {
    "command": "vllm-omni-sched simulate x.toml",
    "date": "2026-01-02T03:04:05+00:00",
    "revision": "abc",
    "seed": 7,
}


def body(*records):
    return {"simulated": True, "provenance": PROVENANCE, "results": list(records)}


def searched(variant, *values, tuned=None, **swept):
    return [
        {
            "variant": variant,
            "values": swept,
            "seed": seed,
            "found": {"value": value},
            "summary": {},
            **({"tuned": tuned} if tuned else {}),
        }
        for seed, value in enumerate(values, 1)
    ]


def lines(text):
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]


def test_ours_is_compared_with_each_by_pairs_of_seeds() -> None:
    text = paper_tables.searched(
        body(
            *searched("7B: stock at its best", 2.0, 2.2),
            *searched("7B: split at its best", 5.0, 5.5),
            *searched("7B: ours at its best", 6.0, 6.6),
        )
    )
    head, row = lines(text)
    assert head.startswith(
        "|  | stock at its best | split at its best | ours at its best | ours to stock at its best |"
    )
    # 2.1, and 12.7 times the standard error of two values 0.2 apart
    assert row.startswith("| 7B | 2.10 ± 1.27 | 5.25 ± 3.18 | 6.30 ± 3.81 |")
    assert row.endswith("| 3.00x (3.00 to 3.00) | 1.20x (1.20 to 1.20) |")
    assert "revision abc, seeds 1 to 2, mean ± half of the 95 % interval.*" in text


@pytest.mark.parametrize(
    "name", ["paper", "paper-points", "paper-concurrency", "paper-decoding", "paper-slo", "paper-throughput"]
)
def test_no_share_of_a_result_is_above_all(name) -> None:
    for one in (paper_tables.study(name) or {"results": []})["results"]:
        parts = [part for stage in one["summary"]["utilisation"].values() for part in stage.values()]
        assert max((*parts, one["summary"].get("operations") or 0.0)) <= 1 + 1e-9, (one["variant"], one["values"])


def test_the_headline_compares_with_the_better_layout_of_vllm_and_says_whether_the_lane_was_on() -> None:
    found = body(
        *searched("7B: stock at its best", 2.0, 2.0),
        *searched("7B: split at its best", 4.0, 4.0),
        *searched("7B: ours at its best", 5.0, 5.0, tuned={"chosen": {"layout": {"policy.encode_ahead": False}}}),
        *searched("72B: stock at its best", 1.0, 1.0),
        *searched("72B: ours at its best", 1.1, 1.1, tuned={"chosen": {"policy.encode_ahead": True}}),
    )
    factors = body(
        *searched("7B: stock at its best", 0.6, 0.6),
        *searched("7B: split at its best", 0.3, 0.3),
        *searched("7B: ours at its best", 0.4, 0.4),
    )
    text = paper_tables.headline(found, factors, found)
    assert "serves 1.10 (72B) to 1.25 times (7B) the requests within the SLO" in text
    assert "or keeps an SLO 0.75 times as tight" in text, "split is the better one"
    assert "The search turned the lane on in 1 of 2 of these cases" in text
    assert "a saturated node has 1.10 to 2.50 times the throughput of vLLM in one engine" in text
    assert "tight" not in paper_tables.headline(found, None, None)

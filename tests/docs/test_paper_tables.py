"""Tables of the studies: the number in the cell is the number in the file."""

import importlib
import json
import sys
from pathlib import Path

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


def searched(variant, value, **values):
    return {"variant": variant, "values": values, "found": {"value": value}, "summary": {}}


def lines(text):
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]


def test_ours_is_compared_with_each() -> None:
    text = paper_tables.searched(
        body(searched("7B baseline", 2.0, t=147), searched("7B split", 5.0, t=147), searched("7B ours", 6.0, t=147))
    )
    assert lines(text)[1] == "| 7B, 147 embeddings a frame | 2 | 5 | 6 | 3.00x | 1.20x |"
    assert "*Simulated: `vllm-omni-sched simulate x.toml`, 2026-01-02, revision abc, seed 7.*" in text


def test_of_an_slo_less_is_more() -> None:
    text = paper_tables.searched(body(searched("7B baseline", 1.0), searched("7B ours", 0.5)), less=True)
    assert lines(text)[1] == "| 7B | 1 |  | 0.5 | 2.00x |  |"


def test_what_was_not_found_has_no_ratio() -> None:
    text = paper_tables.searched(
        body(searched("99 %: baseline", 0.0), searched("99 %: ours", None), searched("99 %: ours + cores", 3.0))
    )
    assert lines(text)[1] == "| 99 % | 0 |  |  | 3 |  |  |"


def test_how_busy_stages_were() -> None:
    summary = {
        "utilisation": {"video": {"all": 0.014, "decode": 0.014}, "llm": {"all": 0.9, "llm": 0.7, "encode": 0.2}}
    }
    text = paper_tables.utilisation(body({"variant": "7B ours", "values": {}, "summary": summary}))
    assert "video 1 %, llm 90 %" in text


def test_an_ablation_has_a_row_for_each_mechanism() -> None:
    def one(variant, goodput):
        times = {"itl_seconds": {"p99": 0.0123}, "ttft_seconds": {"p50": 1.0, "p99": 2.5}}
        return {
            "variant": variant,
            "values": {},
            "summary": {"goodput_per_second": goodput, "within_slo": 0.5, **times},
        }

    named = ["none", "all", "only lane", "all but lane"]
    text = paper_tables.ablation(body(*(one(name, 1.0 + at) for at, name in enumerate(named))))
    none, lane = lines(text)[1:]
    assert none == "| none → all | 1 → 2 | 0.5 → 0.5 | 12.3 → 12.3 | 1 → 1 | 2.5 → 2.5 |"
    assert lane.startswith("| lane | 3 → 4 |")


def test_a_file_that_is_not_there_leaves_a_word(tmp_path) -> None:
    assert paper_tables.study("paper", tmp_path) is None
    (tmp_path / "paper.json").write_text(json.dumps(body()))
    assert paper_tables.study("paper", tmp_path)["results"] == []

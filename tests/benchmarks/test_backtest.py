"""Test what the back-test predicts, measures and compares, without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.backtest import EMBEDS, WARM_UP_SECONDS
from benchmarks.backtest.compare import compare
from benchmarks.backtest.figures import FIGURES
from benchmarks.backtest.predict import predict, write_scenario
from benchmarks.backtest.traces import Planned, plan, write
from vllm_omni_sched.sim.workloads.trace import read_trace

COSTS = {
    "format": "vllm-omni-sched calibration",
    "version": 1,
    "source": "a test",
    "step": {
        "base_seconds": 5e-3,
        "per_decode": 0.0,
        "per_context_token": 0.0,
        "per_prefill_token": 1e-5,
        "per_prefill_pair": 0.0,
    },
    "encode": {"image": {"base_seconds": 0.1, "per_item": 0.0, "per_embed": 0.0}},
    "encode_in_lane": {"image": {"base_seconds": 0.1, "per_item": 0.0, "per_embed": 0.0}},
    "frontend": {"per_request": 3e-3, "per_text_token": 0.0, "per_item": {"image": 0.0}},
    "answer_seconds": 1e-3,
    "kv_tokens": 100_000,
}


class Letters:
    """A tokenizer with a token for each letter, and one for a picture."""

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool) -> str:
        assert not tokenize
        return "u:" + "".join("#" if part["type"] == "image" else part["text"] for part in messages[0]["content"])

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text)))}


def drawn(name: str, seed: int = 1) -> list[Planned]:
    return plan(name, 20.0, seed, Letters())


def test_the_simulator_gets_the_same_requests(tmp_path: Path) -> None:
    planned = drawn("servegen-images")
    write(tmp_path / "a.jsonl", "servegen-images", planned, 1)
    read = read_trace(tmp_path / "a.jsonl").requests
    assert [(one.at, one.text_tokens, one.output_tokens) for one in read] == [
        (pytest.approx(one.at, abs=1e-6), one.text_tokens, one.output_tokens) for one in planned
    ]
    assert [one.items for one in read] == [(("image", EMBEDS),) * one.pictures for one in planned]


def figures_of(folder: Path, planned: list[Planned], variant: str = "stock") -> dict[str, dict[str, float]]:
    (folder / "costs.json").write_text(json.dumps(COSTS))
    write(folder / "t.jsonl", "t", planned, 1)
    return predict(write_scenario(folder, "t", variant, 20.0, folder / "costs.json"))


def test_a_lonely_request_is_predicted_as_its_costs_say(tmp_path: Path) -> None:
    found = figures_of(tmp_path, [Planned(1.0, "", 0, 5, 10), Planned(WARM_UP_SECONDS + 1, "", 0, 21, 100)])
    ttft = 3e-3 + 5e-3 + 100 * 1e-5 + 1e-3
    assert found["TTFT P50"]["predicted"] == pytest.approx(ttft)
    assert found["ITL P50"]["predicted"] == pytest.approx(5e-3, rel=0.01)
    assert found["end to end P99"]["predicted"] == pytest.approx(ttft + 20 * 5e-3)
    assert found["within SLO"] == {"predicted": 1.0, "least": 1.0, "most": 1.0}
    assert set(found) == set(FIGURES)


def answer(due: float, outputs: list[float], tokens: int | None = None, late: float = 0.0) -> dict[str, Any]:
    return {"due": due, "sent": due + late, "outputs": outputs, "tokens": tokens or len(outputs), "pictures": 0}


def test_an_error_is_held_against_its_bar_and_against_the_spread_of_the_measurement() -> None:
    at = WARM_UP_SECONDS
    expected = {name: {"predicted": 0.115, "least": 0.11, "most": 0.12} for name in FIGURES}
    rounds = [[answer(at, [at + 0.09])], [answer(at, [at + 0.11])]]
    rounds = [[{**one, "outputs": [*one["outputs"], one["outputs"][0] + 0.115]} for one in own] for own in rounds]
    records = {
        record["figure"]: record
        for record in compare([{"trace": "t", "variant": "stock", "figures": expected}], {("t", "stock"): rounds})
    }
    assert records["TTFT P50"]["measured"] == pytest.approx(0.1)
    assert records["TTFT P50"]["off"] == pytest.approx(0.15)
    assert records["TTFT P50"]["spread"] == pytest.approx(0.2)
    assert (records["TTFT P50"]["within"], records["TTFT P50"]["explained"]) == (False, True)
    assert records["TTFT P99"]["within"]  # its bar is wider
    assert records["ITL P50"]["within"]
    assert records["within SLO"]["within"] is None
    slow = [[{**one, "outputs": [at + 9.0, at + 9.1]} for one in rounds[0]]]
    thrice = compare([{"trace": "t", "variant": "stock", "figures": expected}], {("t", "stock"): rounds + slow})
    assert thrice[0]["measured"] == pytest.approx(0.11)  # one slow start does not count
    once = compare([{"trace": "t", "variant": "stock", "figures": expected}], {("t", "stock"): rounds[:1]})
    assert {(record["spread"], record["explained"]) for record in once} == {(None, None)}

"""What the pipeline is asked, what is fitted, and with what it is compared. Pipelines: the benchmark itself."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sim_fidelity.pace import REFERENCE, at_usual_pace, costs_at, with_paces
from benchmarks.sim_fidelity.pipeline import EVALUATED, plan
from benchmarks.sim_fidelity.pipeline_compare import ALL, Pair, compare, measured
from benchmarks.sim_fidelity.pipeline_fit import FRONT, fitted
from benchmarks.sim_fidelity.pipeline_loads import SAYS_EACH, Wave, arriving, designed
from benchmarks.sim_fidelity.pipeline_simulate import simulated

FIRST, SECOND, PROMPT_TOKEN, HANDED = 5e-3, 6e-3, 4e-5, 3e-3
BESIDE = {1: 4e-3, 2: 7e-3}  # of the first stage, with its part of the cores


def told(name: str, wave: Wave) -> dict[str, Any]:
    """A load on a pipeline whose stages take round numbers: a step each, whatever it has; a front end of 10 ms."""
    others = int(name[-1]) if name.startswith("beside") else 0
    own, longest = [], 0.0
    for one in wave:
        step = FIRST + (BESIDE[others] if others and one["thinks"] > 1 else 0.0)
        first = 0.01 + step + PROMPT_TOKEN * one["prompt_tokens"]
        outputs = [first + step * i for i in range(one["thinks"])]
        end = outputs[-1] + HANDED + SECOND * one["says"]
        longest = max(longest, one["at"] + end)
        own.append({**one, "outputs": outputs, "end": end})
    said = sum(one["says"] for one in wave) if len(wave) < 3 else max(one["says"] for one in wave) * 2
    cpu = {FRONT: 0.2 * longest + 2e-3 * len(wave), "0/0": 1.0, "1/0": SECOND * said / 2, "1/1": SECOND * said / 2}
    return {"name": name, "told": own, "seconds": longest, "cpu_seconds": cpu}


@pytest.fixture
def waves() -> list[dict[str, Any]]:
    return [told(name, wave) for name, wave in designed().items()]


def test_arrivals_are_those_of_their_seed_and_rate() -> None:
    wave = arriving("poisson", 5.0, 400.0, seed=3)
    assert wave == arriving("poisson", 5.0, 400.0, seed=3) != arriving("poisson", 5.0, 400.0, seed=4)
    assert len(wave) / 400 == pytest.approx(5.0, rel=0.1)
    assert all(one["says"] == SAYS_EACH * one["thinks"] for one in wave)
    assert all(0 <= one["at"] < 400 for one in wave)


def test_bursty_arrivals_have_gaps_that_vary_twice_as_much() -> None:
    def variation(kind: str) -> float:
        at = [one["at"] for one in arriving(kind, 5.0, 2000.0, seed=3)]
        gaps = [after - before for before, after in itertools.pairwise(at)]
        mean = sum(gaps) / len(gaps)
        return float((sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 / mean)

    assert variation("poisson") == pytest.approx(1.0, rel=0.1)
    assert variation("bursty") == pytest.approx(2.0, rel=0.15)


def test_what_is_evaluated_is_never_what_is_calibrated_with() -> None:
    steps = list(plan(1, 5.0, 7))
    assert steps[0][0]["name"] == steps[-1][0]["name"] == REFERENCE
    evaluated = [wave for facts, wave in steps if facts["name"] == EVALUATED]
    assert len(evaluated) == 6
    assert not any(wave in evaluated for facts, wave in steps if facts["name"] != EVALUATED)


def test_costs_are_found_again(waves: list[dict[str, Any]]) -> None:
    found = fitted(waves)
    first, second = (stage["step"] for stage in found.stages)
    assert first["base_seconds"] + first["per_decode"] == pytest.approx(FIRST, rel=0.05)
    assert first["per_prefill_token"] == pytest.approx(PROMPT_TOKEN, rel=0.05)
    # of its loss beside two others, half a step is its part of the two cores
    assert first["beside"] == pytest.approx([BESIDE[1], BESIDE[2] - FIRST / 2], rel=1e-3)
    assert second["base_seconds"] + second["per_decode"] == pytest.approx(SECOND, rel=0.1)
    assert found.polling == pytest.approx(0.2, rel=0.05)
    assert found.stages[0]["frontend"]["per_request"] == pytest.approx(1e-3, rel=0.05)


def test_one_request_that_the_machine_held_up_changes_no_cost(waves: list[dict[str, Any]]) -> None:
    costs = fitted(waves)
    for name in ("prompt 20", "prompt 600"):
        held_up = next(wave for wave in waves if wave["name"] == name)["told"][2]
        held_up["outputs"] = [seconds + 0.3 for seconds in held_up["outputs"]]
        held_up["end"] += 0.5
    again = fitted(waves)
    assert again.stages[0]["answer_seconds"] == pytest.approx(costs.stages[0]["answer_seconds"], rel=1e-6)
    assert again.link_seconds == pytest.approx(costs.link_seconds, rel=1e-6)
    assert again.stages[0]["step"]["per_prefill_token"] == pytest.approx(PROMPT_TOKEN, rel=0.05)


def test_a_load_that_is_missing_is_an_error(waves: list[dict[str, Any]]) -> None:
    with pytest.raises(KeyError, match="not measured"):
        fitted([wave for wave in waves if wave["name"] != "prompt 150"])


def test_a_lonely_request_is_simulated_as_it_was_measured(waves: list[dict[str, Any]], tmp_path: Path) -> None:
    wave = told("alone", [{"at": 1.0, "prompt_tokens": 100, "thinks": 10, "says": 20}])
    facts = {"variant": "stock", "seed": 1}
    again = simulated(fitted(waves), {**wave, **facts, "pace": 1.0}, tmp_path)
    was = measured(wave["told"])
    assert again["TTFT"] == pytest.approx(was["TTFT"], rel=0.2)
    assert again["end to end"] == pytest.approx(was["end to end"], rel=0.2)
    slow = simulated(fitted(waves), {**wave, **facts, "pace": 2.0}, tmp_path)
    assert slow["end to end"] == pytest.approx([2 * again["end to end"][0]], rel=0.1)


def test_the_pace_of_a_wave_is_that_of_the_references_around_it() -> None:
    def reference(gap: float) -> dict[str, Any]:
        return {"name": REFERENCE, "told": [{"outputs": [gap * i for i in range(20)]}]}

    wave = {"name": "a load"}
    paced = with_paces([reference(1.0), reference(2.0), wave, reference(3.0), wave, reference(2.0)])
    # 2 is usual; before the first wave it was 1.5 in the mean of two, behind it 3
    assert [one["pace"] for one in paced if one["name"] == "a load"] == pytest.approx([2.25 / 2, 2.5 / 2])
    with pytest.raises(ValueError, match="the first and the last"):
        with_paces([wave, reference(1.0)])


def test_a_slow_machine_is_no_costlier_pipeline(waves: list[dict[str, Any]]) -> None:
    slow = []
    for wave in waves:
        own = [{**o, "outputs": [2 * s for s in o["outputs"]], "end": 2 * o["end"]} for o in wave["told"]]
        cpu = {who: 2 * seconds for who, seconds in wave["cpu_seconds"].items()}
        slow.append({**wave, "told": own, "seconds": 2 * wave["seconds"], "cpu_seconds": cpu, "pace": 2.0})
    usual = [at_usual_pace(wave) for wave in slow]
    step = fitted(usual).stages[0]["step"]
    assert step["base_seconds"] + step["per_decode"] == pytest.approx(FIRST, rel=0.05)
    twice = costs_at(2.0, fitted(usual).stages[0])
    assert twice["step"]["beside"] == pytest.approx([2 * seconds for seconds in step["beside"]])
    assert twice["step"]["steadiness"] == step["steadiness"]


def test_a_figure_is_within_or_too_far_and_the_end_has_no_bar() -> None:
    def pair(load: float, measured: float, says: float) -> Pair:
        wave = {"variant": "stock", "arrivals": "poisson", "load": load}
        names = ("TTFT", "ITL", "end to end")
        return Pair(wave, {name: [measured] for name in names}, {name: [says] for name in names})

    records = {
        (r["arrivals"], r["load"], r["measure"]): r for r in compare([pair(0.3, 1.0, 1.14), pair(0.9, 1.0, 1.2)])
    }
    assert records["poisson", 0.3, "TTFT P50"]["within"]
    assert not records["poisson", 0.9, "ITL P50"]["within"]
    assert records["poisson", 0.9, "ITL P99"]["within"]
    assert records[ALL, None, "TTFT P50"]["off"] == pytest.approx(0.17)
    assert "within" not in records[ALL, None, "end to end P50"]

"""What the pipeline is asked, what is fitted, and with what it is compared. Pipelines: the benchmark itself."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sim_fidelity.pace import REFERENCE
from benchmarks.sim_fidelity.pipeline import EVALUATED, plan
from benchmarks.sim_fidelity.pipeline_fit import FRONT, fitted
from benchmarks.sim_fidelity.pipeline_loads import Wave, designed

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

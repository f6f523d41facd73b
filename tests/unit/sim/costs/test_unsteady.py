"""Steps around what is fitted, as often as was measured."""

from __future__ import annotations

from random import Random
from statistics import fmean, stdev

import pytest

from vllm_omni_sched.sim.costs.measured import (
    Calibration,
    EncodeCosts,
    FrontendCosts,
    MeasuredCosts,
    StepCosts,
    UnsteadyCosts,
)

TABLE = [(0.0, 0.5), (0.5, 1.0), (0.9, 1.5), (1.0, 4.0)]


def measured(steadiness: list[tuple[float, float]] | None) -> MeasuredCosts:
    step = StepCosts(
        base_seconds=4e-3,
        per_decode=1e-4,
        per_context_token=0.0,
        per_prefill_token=0.0,
        per_prefill_pair=0.0,
        steadiness=steadiness,
    )
    return MeasuredCosts(
        Calibration(
            version=1,
            source="a test",
            step=step,
            encode={"image": EncodeCosts(base_seconds=0.1, per_item=0.0, per_embed=0.0)},
            frontend=FrontendCosts(per_request=1e-3, per_text_token=0.0),
            answer_seconds=1e-3,
            kv_tokens=1024,
        )
    )


@pytest.mark.parametrize(
    ("part", "factor"), [(0.0, 0.5), (0.25, 0.75), (0.5, 1.0), (0.7, 1.25), (0.95, 2.75), (1.0, 4.0)]
)
def test_the_factor_of_a_part_is_read_between_two_of_the_table(part: float, factor: float) -> None:
    assert UnsteadyCosts(measured(TABLE), Random(1)).factor(part) == pytest.approx(factor)


def test_steps_are_distributed_as_the_table_says() -> None:
    costs = UnsteadyCosts(measured(TABLE), Random(5))
    steady = measured(TABLE).step_seconds(2, 100, 0, 0.0)
    drawn = sorted(costs.step_seconds(2, 100, 0, 0.0) / steady for _ in range(4000))
    assert drawn[2000] == pytest.approx(1.0, rel=0.05)
    assert drawn[3400] == pytest.approx(1.4375, rel=0.05)
    assert 0.5 <= drawn[0] < drawn[-1] <= 4.0


def test_the_same_seed_draws_the_same_steps() -> None:
    steps = [[UnsteadyCosts(measured(TABLE), Random(7)).step_seconds(1, 1, 0, 0.0) for _ in range(5)] for _ in range(2)]
    assert steps[0] == steps[1]


def test_without_a_table_steps_are_as_fitted() -> None:
    costs = UnsteadyCosts(measured(None), Random(1))
    assert [costs.step_seconds(1, 1, 0, 0.0) for _ in range(20)] == pytest.approx([4.1e-3] * 20)


def test_only_steps_are_unsteady_and_nothing_is_no_step() -> None:
    costs = UnsteadyCosts(measured(TABLE), Random(1))
    assert {costs.encode_seconds("image", 576) for _ in range(20)} == {0.1}
    assert costs.step_seconds(0, 0, 0, 0.0) == 0.0


def test_a_step_as_long_as_many_has_the_mean_of_as_many_factors() -> None:
    table = [(0.0, 0.5), (1.0, 1.5)]
    usual = measured(table).step_seconds(1, 0, 0, 0.0)
    costs = UnsteadyCosts(measured(table), Random(3))
    spread = {}
    for times in (1, 25):
        decodes = 1 + round((times - 1) * usual / 1e-4)  # each costs so many seconds
        steady = measured(table).step_seconds(decodes, 0, 0, 0.0)
        drawn = [costs.step_seconds(decodes, 0, 0, 0.0) / steady for _ in range(2000)]
        spread[times] = stdev(drawn)
        assert fmean(drawn) == pytest.approx(1.0, rel=0.02)
    assert spread[1] / spread[25] == pytest.approx(5.0, rel=0.1)  # the root of 25

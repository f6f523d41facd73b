"""Replicas that move ahead of the load: what the planner wants is carried out, if the forecast deserves it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_moves import MovingRig, at
from tests.support.omni_stages import StageSpec
from vllm_omni_sched.omni.stages.foresight import TESTED, Foresight

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

ONE, TWO = StageSpec(), StageSpec(replicas=2, final_output=True)


class Loaded(MovingRig):
    """A request of the first stage takes ten seconds, and one of the second one."""

    def __init__(self, *stages: StageSpec, **forecast: Any) -> None:
        given = {"enabled": True, "move_replicas": True} | forecast
        super().__init__(*stages, monitoring={"forecast": given})

    async def __aenter__(self) -> MovingRig:
        await super().__aenter__()
        await self.ask("warm-up")
        for stage_id, seconds in enumerate((10.0, 1.0)):
            self.now += seconds
            await self.finish(stage_id, "warm-up")
        return self

    async def forecast(self, requests_per_second: float, tested: bool = True) -> None:
        self.omni._prepare(requests_per_second, tested)
        await self.tick()
        await self.tick()


async def test_a_replica_goes_where_the_load_will_be() -> None:
    async with Loaded(ONE, TWO) as rig:
        await rig.forecast(0.15)
        assert rig.live() == [[0, 1], [0]]
        assert rig.runtime.on == [(0, 1, "2")]


async def test_not_before_the_model_was_tested_or_while_it_errs() -> None:
    async with Loaded(ONE, TWO) as rig:
        await rig.forecast(0.15, tested=False)
        assert rig.live() == [[0], [0, 1]]


async def test_not_unless_the_options_say_so() -> None:
    async with Loaded(ONE, TWO, move_replicas=False) as rig:
        await rig.forecast(0.15)
        assert rig.live() == [[0], [0, 1]]


async def test_no_more_than_the_maximum() -> None:
    async with Loaded(ONE, TWO, max_replicas=1) as rig:
        await rig.forecast(0.15)
        assert len(rig.live()[0]) == 1


async def test_a_stage_does_not_give_what_it_needs() -> None:
    async with Loaded(ONE, TWO) as rig:
        await rig.forecast(1.5)
        assert rig.live() == [[0], [0, 1]]


async def test_what_is_spare_is_stopped_and_comes_back_with_the_load() -> None:
    async with Loaded(ONE, TWO) as rig:
        await rig.forecast(0.01)
        assert rig.live() == [[0], [0, 1]]
        rig.now += 301.0
        await rig.forecast(0.01)
        assert rig.live() == [[0], [0]]
        assert rig.moves.places.spare == ["2"]
        await rig.forecast(0.15)
        assert rig.live() == [[0, 1], [0]]
        assert rig.moves.places.of(at(0, 1)) == "2"


async def test_a_guarded_or_untested_forecast_is_told_as_such() -> None:
    async with Loaded(ONE, TWO) as rig:
        foresight = rig.policies.foresight
        assert isinstance(foresight, Foresight)
        told: list[tuple[float, bool]] = []
        await foresight._forecast(dict.fromkeys(foresight._counts, 1), rig.now, lambda *how: told.append(how))
        assert [tested for _, tested in told] == [False]  # one bin is no history
        assert {reason.value for reason in TESTED} == {"best", "quiet"}

"""Replicas that move ahead of the load: what the planner wants is carried out, if the forecast deserves it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_moves import MovingRig, at
from tests.support.omni_stages import StageSpec
from vllm_omni_sched.monitor.forecast.history import history_of
from vllm_omni_sched.omni.stages.placement import arrival_file
from vllm_omni_sched.omni.stages.placement.forecaster import Forecaster

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

ONE, TWO = StageSpec(), StageSpec(replicas=2, final_output=True)
LAST = StageSpec(final_output=True)


class Loaded(MovingRig):
    """A request of the first stage takes ten seconds, and one of the second one."""

    def __init__(self, *stages: StageSpec, **forecast: Any) -> None:
        given = {"enabled": True, "move_replicas": True} | forecast
        super().__init__(*stages, monitoring={"forecast": given})

    async def __aenter__(self) -> Loaded:
        await super().__aenter__()
        await self.ask("warm-up")
        for stage_id, seconds in enumerate((10.0, 1.0)):
            self.now += seconds
            await self.finish(stage_id, "warm-up")
        return self

    async def forecast(self, requests_per_second: float, tested: bool = True) -> None:
        """So many for both stages."""
        self.omni._prepare_for_load(dict.fromkeys((0, 1), requests_per_second), tested)
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
        assert rig.migrator.devices.spare == ["2"]
        await rig.forecast(0.15)
        assert rig.live() == [[0, 1], [0]]
        assert rig.migrator.devices.devices_of(at(0, 1)) == "2"


class Arriving(MovingRig):
    """Requests come each second, are forecast, and run in the time that engines without engines take: none."""

    def __init__(self, *stages: StageSpec, **forecast: Any) -> None:
        given = {"enabled": True, "bin_seconds": 1.0, "season_bins": 2, "horizon_seconds": 1.0} | forecast
        super().__init__(*stages, monitoring={"forecast": given})

    async def second(self, number: int, count: int, stages: int, seconds: tuple[float, ...]) -> None:
        """So many texts, which end after so many stages, and take so long in each of them, one at a time."""
        began = self.now
        for i in range(count):
            name = f"{number}.{i}"
            await self.ask(name, (number, i), stages=stages)
            for stage_id in range(stages):
                self.now += seconds[stage_id]
                await self.finish(stage_id, name)
        self.now = began + 1.0
        forecaster = self.driver.forecaster
        assert isinstance(forecaster, Forecaster)
        forecaster.check(self.now, self.omni._prepare_for_load)
        if forecaster._fitting is not None:
            await forecaster._fitting
        await self.tick(0.0)


async def test_from_arrivals_to_a_move() -> None:
    """Texts that end in the first stage make it need two replicas; the second one, that they never see, gives one."""
    async with Arriving(LAST, TWO, move_replicas=True, max_replicas=2) as rig:
        await rig.second(0, 1, 2, (0.2, 0.2))
        for number in range(1, 70):
            await rig.second(number, 4, 1, (0.25,))
            if rig.live() != [[0], [0, 1]]:
                break
        assert rig.live() == [[0, 1], [0]]
        assert number >= 30, "a model has to be tested first"


async def run(rig: Arriving, seconds: int) -> Forecaster:
    for number in range(seconds):
        await rig.second(number, 1, 1, (0.1,))
    forecaster = rig.driver.forecaster
    assert isinstance(forecaster, Forecaster)
    return forecaster


async def test_counts_survive_a_restart_in_a_file_of_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "arrivals.json"
    async with Arriving(LAST, history_path=str(path)) as rig:
        await run(rig, 6)
    saved = history_of(path.read_bytes())
    assert saved.bin_seconds == 1.0
    assert sum(saved.counts["text"]) >= 4
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["arrivals.json"]
    async with Arriving(LAST, history_path=str(path)) as rig:
        forecaster = await run(rig, 4)
        counts = forecaster._model.history(rig.now, saved.until).counts["text"]
    assert counts[: len(saved.counts["text"])] == saved.counts["text"]
    assert len(counts) > len(saved.counts["text"])


@pytest.mark.parametrize("content", [None, b"damaged", b'{"bin_seconds": 7, "until": 0, "counts": {}}'])
async def test_without_a_usable_file_a_forecast_begins_anew(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "arrivals.json"
    if content is not None:
        path.write_bytes(content)
    async with Arriving(LAST, history_path=str(path)) as rig:
        await run(rig, 4)
    assert history_of(path.read_bytes()).counts["text"]


async def test_a_place_that_cannot_be_written_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(arrival_file.logger, "warning", lambda text, *values: said.append(text % values))
    async with Arriving(LAST, history_path=str(tmp_path / "missing" / "arrivals.json")) as rig:
        await run(rig, 5)
    (warning,) = said
    assert "cannot be saved" in warning

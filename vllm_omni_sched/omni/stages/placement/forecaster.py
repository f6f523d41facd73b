"""Count and forecast arrivals, and prepare stages for the load."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from vllm_omni_sched.clock import Clock, wall_seconds
from vllm_omni_sched.config.stage_options import ForecastOptions
from vllm_omni_sched.monitor.forecast.load import Forecast, ForecastReason, LoadForecast
from vllm_omni_sched.monitor.forecast.load import ForecastOptions as Model
from vllm_omni_sched.monitor.forecast.plan import Move, PoolPlan, PoolState, ReplicaPlanner
from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.omni.stages.placement.arrival_file import ArrivalFile

MODALITIES = ("text", "image", "audio", "video")
TESTED = (ForecastReason.BEST, ForecastReason.QUIET)  # not while there is too little data to test a model, or one errs
KEPT = 0.9  # decay per bin of the counts of visited stages: about the last ten bins count
Prepare = Callable[[Mapping[int, float], bool], None]


class StageShares:
    """Estimates the fraction of a modality's requests that run in each stage, from those that have recently left."""

    def __init__(self) -> None:
        self._left: defaultdict[str, float] = defaultdict(float)
        self._ran: defaultdict[tuple[str, int], float] = defaultdict(float)

    def left(self, modality: str, stages: Iterable[int]) -> None:
        """Record that a request has left after running in these stages."""
        self._left[modality] += 1
        for stage_id in set(stages):
            self._ran[modality, stage_id] += 1

    def fade(self) -> None:
        """Decay the counts, so that recent requests count more."""
        for modality in self._left:
            self._left[modality] *= KEPT
        for way in self._ran:
            self._ran[way] *= KEPT

    def rates(self, rates: Mapping[str, float]) -> dict[int, float]:
        """Return the requests per second of each stage for given rates by modality; unvisited stages are left out."""
        found: dict[int, float] = {}
        for (modality, stage_id), ran in self._ran.items():
            if ran:
                part = ran / self._left[modality]
                found[stage_id] = found.get(stage_id, 0.0) + part * rates[modality]
        return found


class Forecaster:
    """Forecasts arrivals by modality once per bin, and plans replicas before the load arrives.

    Fitting models takes long, so it runs beside the event loop; a forecast that is late is used once it is done.

    Args:
        options: options of the forecast.
        board: publishes observed and forecast rates.
        wall: the wall clock, to which the bins of a saved history belong.

    Raises:
        ConfigError: statsmodels is missing.
    """

    def __init__(self, options: ForecastOptions, board: StageBoard, wall: Clock = wall_seconds) -> None:
        self._options, self._board = options, board
        self._model = LoadForecast(
            Model(
                bin_seconds=options.bin_seconds,
                season_bins=options.season_bins,
                horizon_seconds=options.horizon_seconds,
            )
        )
        self._planner = ReplicaPlanner()
        self._counts = dict.fromkeys(MODALITIES, 0)
        path = options.history_path
        self._file = ArrivalFile(Path(path), wall) if path is not None else None
        self._loaded = False
        self.shares = StageShares()
        self._began: float | None = None
        self._fitting: asyncio.Task[None] | None = None

    def arrived(self, modality: str) -> None:
        """Count a request that has arrived."""
        self._counts[modality] += 1

    def check(self, now: float, prepare: Prepare) -> None:
        """Forecast once per bin, and pass `prepare` the most requests per second to expect, by stage.

        A stage gets the fraction of a modality's requests that recently ran there: not those that end earlier, or share
        the work of others there.

        `prepare` also gets whether the forecast may be trusted for moving replicas: whether each modality's forecast is
        from a model that was tested and that the guard has not rejected since.
        """
        if self._began is None:
            self._began = now
        if now - self._began < self._options.bin_seconds or (self._fitting and not self._fitting.done()):
            return
        counts, self._counts = self._counts, dict.fromkeys(MODALITIES, 0)
        seconds, self._began = now - self._began, now
        for modality, count in counts.items():
            self._board.load(modality, observed=count / seconds)
        self._fitting = asyncio.get_running_loop().create_task(self._forecast(counts, now, prepare))

    async def _forecast(self, counts: Mapping[str, int], now: float, prepare: Prepare) -> None:
        forecasts = await asyncio.get_running_loop().run_in_executor(None, self._fit, counts, now)
        for modality, forecast in forecasts.items():
            self._board.load(modality, forecast=max(forecast.mean[0], 0.0) / self._options.bin_seconds)
        tested = all(forecast.reason in TESTED for forecast in forecasts.values())
        most = {name: max(0.0, *forecast.high) / self._options.bin_seconds for name, forecast in forecasts.items()}
        rates = self.shares.rates(most)
        self.shares.fade()
        prepare(rates, tested)

    def _fit(self, counts: Mapping[str, int], now: float) -> dict[str, Forecast]:
        """Update the model and forecast; only this method uses the model and its file, in one thread at a time."""
        if self._file is not None and not self._loaded:
            self._loaded = True
            self._file.load(self._model, now)
        for modality, count in counts.items():
            self._model.observe(now, modality, count)
        forecasts = {modality: self._model.forecast(now, modality) for modality in counts}
        if self._file is not None:
            self._file.save(self._model, now)
        return forecasts

    def plan(
        self, stages: Mapping[str, PoolState], spare: int, now: float
    ) -> tuple[Mapping[str, PoolPlan], tuple[Move, ...]]:
        """Return the replicas for the load that is to come, and the moves to get there."""
        return self._planner.plan(stages, spare, now)

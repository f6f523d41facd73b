"""Counts arrivals, forecasts them, and prepares stages for what is to come."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from vllm_omni_sched.monitor.forecast.load import Forecast, ForecastReason, LoadForecast
from vllm_omni_sched.monitor.forecast.load import ForecastOptions as Model
from vllm_omni_sched.monitor.forecast.plan import Move, PlanOptions, PoolPlan, PoolState, ReplicaPlanner
from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.stage_options import ForecastOptions

MODALITIES = ("text", "image", "audio", "video")
TESTED = (ForecastReason.BEST, ForecastReason.QUIET)  # not while there is too little to test a model, or one errs
KEPT = 0.9  # from bin to bin, of the counts of where requests went: those of the last ten bins or so
Prepare = Callable[[Mapping[int, float], bool], None]


class Ways:
    """What part of the requests of a modality runs in a stage, by those that have left the pipeline."""

    def __init__(self) -> None:
        self._left: defaultdict[str, float] = defaultdict(float)
        self._ran: defaultdict[tuple[str, int], float] = defaultdict(float)

    def left(self, modality: str, stages: Iterable[int]) -> None:
        """A request has left; it ran in these stages."""
        self._left[modality] += 1
        for stage_id in set(stages):
            self._ran[modality, stage_id] += 1

    def fade(self) -> None:
        """Time has passed: what comes now counts for more."""
        for modality in self._left:
            self._left[modality] *= KEPT
        for way in self._ran:
            self._ran[way] *= KEPT

    def rates(self, rates: Mapping[str, float]) -> dict[int, float]:
        """By stage, of so many by modality. One that nobody was seen in has none."""
        found: dict[int, float] = {}
        for (modality, stage_id), ran in self._ran.items():
            if ran:
                part = ran / self._left[modality]
                found[stage_id] = found.get(stage_id, 0.0) + part * rates[modality]
        return found


class Foresight:
    """Forecasts arrivals by modality once per bin, and plans batch limits and replicas before the load is there.

    Fitting models takes long, so it runs beside the loop; a forecast that is not done in time is used when it is.

    Args:
        options: how.
        board: shows what was forecast and what came.
        max_batch_size: what no limit is raised above.

    Raises:
        ConfigError: statsmodels is missing.
    """

    def __init__(self, options: ForecastOptions, board: StageBoard, max_batch_size: int) -> None:
        self._options, self._board = options, board
        self._model = LoadForecast(
            Model(
                bin_seconds=options.bin_seconds,
                season_bins=options.season_bins,
                horizon_seconds=options.horizon_seconds,
            )
        )
        self._planner = ReplicaPlanner(PlanOptions(max_batch_size=max_batch_size))
        self._counts = dict.fromkeys(MODALITIES, 0)
        self.ways = Ways()
        self._began: float | None = None
        self._fitting: asyncio.Task[None] | None = None

    def arrived(self, modality: str) -> None:
        """A request has come."""
        self._counts[modality] += 1

    def look(self, now: float, prepare: Prepare) -> None:
        """Once per bin: forecast, and tell `prepare` the most requests per second that are to come, by stage.

        A stage gets that part of a modality's requests that ran there of late: not those that end before it, or share
        the work of others there.

        It is told, too, whether to believe it so far as to move replicas: whether every modality's forecast is of a
        model that was tested, and that the guard has not put aside since.
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
        rates = self.ways.rates(most)
        self.ways.fade()
        prepare(rates, tested)

    def _fit(self, counts: Mapping[str, int], now: float) -> dict[str, Forecast]:
        """The model is touched here alone, by one thread at a time."""
        for modality, count in counts.items():
            self._model.observe(now, modality, count)
        return {modality: self._model.forecast(now, modality) for modality in counts}

    def plan(
        self, stages: Mapping[str, PoolState], spare: int, now: float
    ) -> tuple[Mapping[str, PoolPlan], tuple[Move, ...]]:
        """Replicas and batch limits for the load that is to come, and the moves to get there."""
        return self._planner.plan(stages, spare, now)

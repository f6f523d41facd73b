"""Scale the replicas of a stage with the load."""

import math
from collections import Counter, deque
from collections.abc import Mapping

from vllm_omni_sched.monitor.forecast.load import Forecast, ForecastOptions, ForecastReason, LoadForecast
from vllm_omni_sched.monitor.forecast.plan import PlanOptions, PoolState, ReplicaPlanner
from vllm_omni_sched.sim.pools.pipeline import Pipeline
from vllm_omni_sched.sim.pools.pool import Pool
from vllm_omni_sched.sim.pools.requests import RequestRun
from vllm_omni_sched.sim.scenario.scenario import Autoscale

_TOLERANCE = 0.1  # nothing happens while the load is off its target by less than that fraction


class ReactiveScaler:
    """Scales replicas by the present load: the rule of Kubernetes' Horizontal Pod Autoscaler.

    1. Desired = ceil(replicas x load / ``utilisation``), the load being requests in the stage over ``at_once``, what
       its replicas serve well together; unchanged while load / utilisation is within a tenth of 1.
    2. Replicas are given up only down to the largest value desired within ``stabilisation_seconds``.
    3. Bounds are applied last.

    (kubernetes.io, "Horizontal Pod Autoscaling", algorithm details.)
    """

    def __init__(self, pipeline: Pipeline, stage: int, options: Autoscale) -> None:
        self._pipeline, self._pool, self.options = pipeline, pipeline.pools[stage], options
        self._at_once = options.at_once or self._pool.spec.at_once
        self._desired: deque[tuple[float, int]] = deque()
        pipeline.sim.after(options.every_seconds, self._look)

    def desired(self, present: int, replicas: int) -> int:
        """Return the desired replicas by rule 1, for so many requests and replicas."""
        over = present / (replicas * self._at_once) / self.options.utilisation
        return replicas if abs(over - 1) <= _TOLERANCE else math.ceil(replicas * over - 1e-9)

    def _look(self, _: None) -> None:
        pipeline, pool, options = self._pipeline, self._pool, self.options
        if not pipeline.active():
            return
        now, have = pipeline.sim.now, pool.target
        desired = self.desired(pool.present, have)
        recent = self._desired
        recent.append((now, desired))
        while recent[0][0] < now - options.stabilisation_seconds:
            recent.popleft()
        if desired < have:
            desired = min(max(one for _, one in recent), have)
        pipeline.scale(pool, min(max(desired, options.minimum), options.maximum))
        pipeline.sim.after(options.every_seconds, self._look)


class StageShares:
    """Estimates the fraction of a modality's requests that run in each stage, from those that have recently left."""

    KEPT = 0.9  # from bin to bin

    def __init__(self) -> None:
        self._left: dict[str, float] = {}
        self._ran: dict[tuple[str, int], float] = {}

    def left(self, run: RequestRun) -> None:
        """Record a request that has left."""
        modality = run.request.modality
        self._left[modality] = self._left.get(modality, 0.0) + 1
        for stage in run.path:
            self._ran[modality, stage] = self._ran.get((modality, stage), 0.0) + 1

    def fade(self) -> None:
        """Decay the counts after a bin."""
        self._left = {modality: count * self.KEPT for modality, count in self._left.items()}
        self._ran = {way: count * self.KEPT for way, count in self._ran.items()}

    def rates(self, rates: Mapping[str, float]) -> dict[int, float]:
        """Return the rate of each stage for given rates by modality."""
        found: dict[int, float] = {}
        for (modality, stage), ran in self._ran.items():
            found[stage] = found.get(stage, 0.0) + ran / self._left[modality] * rates.get(modality, 0.0)
        return found


class ForecastScaler:
    """Scales replicas by the forecast load: the real `LoadForecast` and `ReplicaPlanner`.

    1. Arrivals are counted by modality. Once per bin the most of the next ``horizon_seconds`` is forecast, and the
       fraction for each stage is taken from requests that have left.
    2. The planner sets the replicas; a stage that was never timed is not changed.
    3. Replicas are given up only on a forecast whose model was tested.

    The horizon should be no shorter than a replica's start and a bin together. ``forecast_counts``: number of bins by
    the model used and by the reason, over all modalities; ``guard_trips``: how often the guard rejected a model.

    Raises:
        ConfigError: statsmodels is not installed.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stages: Mapping[int, Autoscale],
        forecast: ForecastOptions,
        plan: PlanOptions | None = None,
    ) -> None:
        self._pipeline, self._stages, self._options = pipeline, dict(stages), forecast
        self.forecast, self.planner = LoadForecast(forecast), ReplicaPlanner(plan)
        self._shares = StageShares()
        self._seen: dict[str, bool] = {}  # whether the guard has rejected its model
        self.forecast_counts: Counter[str] = Counter()
        self.guard_trips = 0
        pipeline.watchers.append(self._watch)
        pipeline.sim.after(forecast.bin_seconds, self._look)

    def _watch(self, run: RequestRun, comes: bool) -> None:
        if comes:
            self._seen.setdefault(run.request.modality, False)
            self.forecast.observe(self._pipeline.sim.now, run.request.modality)
        else:
            self._shares.left(run)

    def _look(self, _: None) -> None:
        pipeline = self._pipeline
        if not pipeline.active():
            return
        now = pipeline.sim.now
        told = {modality: self.forecast.forecast(now, modality) for modality in self._seen}
        self._count(told)
        tested = all(one.reason in (ForecastReason.BEST, ForecastReason.QUIET) for one in told.values())
        rates = self._shares.rates(
            {modality: max(0.0, *one.high) / self._options.bin_seconds for modality, one in told.items()}
        )
        self._shares.fade()
        states = {str(stage): state for stage in self._stages if (state := self._state(stage, rates)) is not None}
        spare = sum(max(state.maximum - state.replicas, 0) for state in states.values())
        plans = self.planner.plan(states, spare, now)[0]
        for name, plan in plans.items():
            pool = pipeline.pools[int(name)]
            if plan.replicas > pool.target or tested:
                pipeline.scale(pool, plan.replicas)
        pipeline.sim.after(self._options.bin_seconds, self._look)

    def _count(self, told: Mapping[str, Forecast]) -> None:
        for modality, one in told.items():
            guarded = one.reason is ForecastReason.GUARDED
            self.guard_trips += guarded and not self._seen[modality]
            self._seen[modality] = guarded
            self.forecast_counts[f"model_{one.model.value}"] += 1
            self.forecast_counts[f"because_{one.reason.value}"] += 1

    def _state(self, stage: int, rates: Mapping[int, float]) -> PoolState | None:
        pool, bounds = self._pipeline.pools[stage], self._stages[stage]
        capacity = bounds.capacity or _measured(pool)
        if capacity is None:
            return None
        return PoolState(pool.target, capacity, rates.get(stage, 0.0), bounds.minimum, bounds.maximum)


def _measured(pool: Pool) -> float | None:
    return 1 / pool.request_seconds if pool.request_seconds else None

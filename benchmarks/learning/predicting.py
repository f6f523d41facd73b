"""Control both limits by PID, with a forecast that raises the batch limit before the load comes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from benchmarks.learning.settings import Setting
from benchmarks.learning.train import INTERVAL_SECONDS, TARGET_SECONDS
from vllm_omni_sched.config.options import ControlMode, OmniSchedConfig
from vllm_omni_sched.monitor.forecast.load import ForecastOptions, LoadForecast
from vllm_omni_sched.monitor.forecast.plan import PlanOptions, PoolState, ReplicaPlanner
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.sim.episode import EpisodeResult, run_episode
from vllm_omni_sched.sim.work import Request

BIN_SECONDS = 5.0
SEQUENCES = 256


class Predicting(PidBatch):
    """A batch limit that a forecast of arrivals raises: the forecast and the planner that stages have.

    There is one replica, whose capacity is the mean rate so far. The forecast is made once in each bin, from past
    arrivals.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__(TARGET_SECONDS, INTERVAL_SECONDS, 8, SEQUENCES, start=SEQUENCES // 4)
        self._forecast = LoadForecast(ForecastOptions(bin_seconds=BIN_SECONDS, season_bins=12, horizon_seconds=10.0))
        self._planner = ReplicaPlanner(PlanOptions(max_batch_size=SEQUENCES))
        self._coming, self._arrived, self._bin = requests, 0, 0

    def _observe(self, latency_seconds: float, now: float, size: int) -> None:
        while self._arrived < len(self._coming) and self._coming[self._arrived].arrival <= now:
            self._forecast.observe(self._coming[self._arrived].arrival, "all")
            self._arrived += 1
        if now // BIN_SECONDS > self._bin and self._arrived:
            self._bin = int(now // BIN_SECONDS)
            expected = max(self._forecast.forecast(now, "all").high, default=0.0) / BIN_SECONDS
            state = PoolState(1, self._arrived / now, max(0.0, expected), self.limit, maximum=1)
            plans, _ = self._planner.plan({"all": state}, 0, now)
            self.raise_to(plans["all"].batch_limit)
        super()._observe(latency_seconds, now, size)


def serve_predicting(setting: Setting, seed: int) -> EpisodeResult:
    """Serve one episode."""
    interval, target = 1e3 * INTERVAL_SECONDS, 1e3 * TARGET_SECONDS
    options = OmniSchedConfig(
        prefill_control=ControlMode.PID,
        control_target_ms=target,
        control_interval_ms=interval,
        encode_ahead=setting.encodes,
    )
    requests = list(takewhile(lambda one: one.arrival < setting.seconds, setting.requests(seed)))
    return run_episode(
        requests,
        setting.costs,
        setting.limits,
        options,
        setting.seconds,
        setting.targets,
        batch=Predicting(requests),
        drain_seconds=setting.seconds / 2,
    )

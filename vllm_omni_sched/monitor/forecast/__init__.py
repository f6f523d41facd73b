"""Forecast the load by modality, and plan the replicas for it."""

from vllm_omni_sched.monitor.forecast.backtest import Score, rolling_origin
from vllm_omni_sched.monitor.forecast.guard import Guard, GuardReason
from vllm_omni_sched.monitor.forecast.load import Forecast, ForecastOptions, ForecastReason, LoadForecast
from vllm_omni_sched.monitor.forecast.models import ModelChoice
from vllm_omni_sched.monitor.forecast.plan import (
    Move,
    MoveReason,
    PlanOptions,
    PoolPlan,
    PoolState,
    ReplicaPlanner,
)

__all__ = [
    "Forecast",
    "ForecastOptions",
    "ForecastReason",
    "Guard",
    "GuardReason",
    "LoadForecast",
    "ModelChoice",
    "Move",
    "MoveReason",
    "PlanOptions",
    "PoolPlan",
    "PoolState",
    "ReplicaPlanner",
    "Score",
    "rolling_origin",
]

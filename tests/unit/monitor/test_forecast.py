"""Load forecasts, the guard, and the plan made of them."""

import importlib.util

import numpy as np
import pytest

from vllm_omni_sched.monitor.forecast.backtest import rolling_origin
from vllm_omni_sched.monitor.forecast.guard import Guard, GuardReason
from vllm_omni_sched.monitor.forecast.history import bytes_of, continued, history_of
from vllm_omni_sched.monitor.forecast.load import ForecastOptions, ForecastReason, LoadForecast
from vllm_omni_sched.monitor.forecast.models import ModelChoice
from vllm_omni_sched.monitor.forecast.plan import Move, MoveReason, PlanOptions, PoolState, ReplicaPlanner

installed = pytest.mark.skipif(importlib.util.find_spec("statsmodels") is None, reason="the extra forecast")
SEASON = 24
OPTIONS = ForecastOptions(
    bin_seconds=60.0, season_bins=SEASON, horizon_seconds=240.0, refit_bins=48, seasons_kept=6, guard_window=12
)


def days(bins, rng, level=100.0):
    at = np.arange(bins)
    return rng.poisson(level * (1 + 0.7 * np.sin(2 * np.pi * at / SEASON))).astype(np.float64)


def tell(forecast, counts, start=0):
    for at, count in enumerate(counts, start):
        forecast.observe(60.0 * at + 1, "image", float(count))
    return 60.0 * (start + len(counts)) + 1


@installed
def test_a_season_is_forecast_before_it_comes():
    forecast = LoadForecast(OPTIONS)
    series = days(196, np.random.default_rng(0))
    now = tell(forecast, series[:192])
    told = forecast.forecast(now, "image")
    assert told.model in (ModelChoice.STL_ETS, ModelChoice.SEASONAL_NAIVE)
    assert told.reason is ForecastReason.BEST
    assert len(told.mean) == 4
    expected = 100 * (1 + 0.7 * np.sin(2 * np.pi * np.arange(192, 196) / SEASON))
    assert np.abs(np.array(told.mean) - expected).max() < 50
    assert all(low <= mean <= high for low, mean, high in zip(told.low, told.mean, told.high, strict=True))
    assert forecast.fits <= 192 / 30  # bounded, whatever is asked


@installed
def test_a_jump_makes_the_guard_speak_up_and_naive_speak():
    forecast = LoadForecast(OPTIONS)
    rng = np.random.default_rng(1)
    tell(forecast, days(192, rng))
    # the day turns round: what is usual at a time of the day is wrong now
    turned = days(300, rng)[12:30]
    now = tell(forecast, turned, start=192)
    told = forecast.forecast(now, "image")
    assert (told.model, told.reason) == (ModelChoice.NAIVE, ForecastReason.GUARDED)
    assert told.mean[0] == pytest.approx(turned[-1])


@installed
def test_little_history_is_forecast_as_now_and_none_as_nothing():
    forecast = LoadForecast(OPTIONS)
    assert forecast.forecast(0.0, "video").reason is ForecastReason.NO_HISTORY
    now = tell(forecast, [7, 9])
    told = forecast.forecast(now, "image")
    assert (told.mean, told.model, told.reason) == (
        pytest.approx((9.0,) * 4),
        ModelChoice.NAIVE,
        ForecastReason.SHORT_HISTORY,
    )
    quiet = forecast.forecast(now + 120, "image")  # bins in which nothing came are zeros
    assert quiet.mean[0] == 0


@installed
def test_a_long_silence_is_no_long_work():
    forecast = LoadForecast(OPTIONS)
    forecast.observe(0.0, "image")
    told = forecast.forecast(1e9, "image")
    assert told.mean[0] == 0
    assert forecast.fits <= 1


@installed
def test_the_back_test_prefers_what_is_right():
    rng = np.random.default_rng(0)
    scores = rolling_origin(days(240, rng), SEASON, 4, 48)
    assert min(scores, key=lambda choice: scores[choice].mae) in (ModelChoice.STL_ETS, ModelChoice.SEASONAL_NAIVE)
    assert scores[ModelChoice.STL_ETS].wql < scores[ModelChoice.NAIVE].wql
    with pytest.raises(ValueError, match="cannot forecast"):
        rolling_origin(days(20, rng), SEASON, 4, 5)


def test_the_guard_takes_trust_away_and_gives_it_back_with_hysteresis():
    guard = Guard(window=4, leave=1.1, come_back=0.9)
    assert [guard.observe(10, 11, 12) for _ in range(4)] == [GuardReason.LEARNING] * 3 + [GuardReason.GOOD]
    while guard.trusted:
        guard.observe(10, 20, 12)
    assert guard.reason is GuardReason.BAD
    told = [guard.observe(10, 12, 12) for _ in range(6)]
    assert told[-1] is GuardReason.ON_TRIAL  # no worse than naive, but no better
    assert not guard.trusted
    assert [guard.observe(10, 10, 12) for _ in range(4)][-1] is GuardReason.GOOD


def pool(replicas, forecast, **options):
    return PoolState(replicas=replicas, capacity=10.0, forecast=forecast, **options)


def test_replicas_come_from_the_spare_ones_then_from_who_has_too_many():
    plans, moves = ReplicaPlanner().plan({"image": pool(1, 30.0), "text": pool(4, 8.0)}, spare=1, now=0.0)
    assert {name: one.replicas for name, one in plans.items()} == {"image": 4, "text": 2}
    assert (plans["image"].reason, plans["text"].reason) == (MoveReason.AHEAD, MoveReason.GIVES)
    assert set(moves) == {Move(None, "image", 1), Move("text", "image", 2)}


def test_replicas_are_given_up_one_by_one_after_the_cooldown():
    planner = ReplicaPlanner(PlanOptions(cooldown_seconds=300.0))
    have, given = 4, []
    for now in range(0, 1500, 60):
        plans, moves = planner.plan({"image": pool(have, 8.0)}, spare=0, now=float(now))
        have = plans["image"].replicas
        given += [now for move in moves if move.target is None]
    assert given == [300, 600]
    assert have == 2  # one would be loaded to 80%, above spare_utilisation


def test_bounds_hold():
    plans, _ = ReplicaPlanner().plan({"a": pool(1, 1000.0, maximum=3), "b": pool(0, 0.0, minimum=2)}, spare=9, now=0.0)
    assert (plans["a"].replicas, plans["a"].reason) == (3, MoveReason.AT_MAX)
    assert plans["b"].replicas == 2


def season(at):
    return 100 * (1 + 0.7 * np.sin(2 * np.pi * at / SEASON))


@installed
@pytest.mark.parametrize("missed", [0, 30])
def test_a_restored_history_is_used_as_if_it_had_been_observed(missed):
    before = LoadForecast(OPTIONS)
    now = tell(before, days(144, np.random.default_rng(0)))
    saved = history_of(bytes_of(before.history(now, wall=1e9)))
    after = LoadForecast(OPTIONS)
    start, wall = 7.0, 1e9 + 60.0 * missed  # another monotonic clock
    after.restore(saved, start, wall)
    told = after.forecast(start, "image")
    assert told.reason is ForecastReason.BEST
    assert told.model is not ModelChoice.NAIVE
    assert after.fits == 1
    assert np.abs(np.array(told.mean) - season(np.arange(144, 148) + missed)).max() < 60
    counts = after.history(start, wall).counts["image"]
    assert counts[-missed - 144 :][:144] == saved.counts["image"]
    assert len(counts) == 144 + missed


def test_bins_in_which_nothing_was_observed_get_the_counts_of_a_season_before():
    assert continued((1.0, 2.0, 3.0), 4, 3) == (1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 1.0)
    assert continued((1.0, 2.0), 3, 3) == (1.0, 2.0, 2.0, 1.0, 2.0)  # the last one until there is a season
    assert continued((), 5, 3) == ()
    assert continued((1.0,), 0, 3) == (1.0,)

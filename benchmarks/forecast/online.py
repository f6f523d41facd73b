"""Run the forecast online: it sees each bin once, and its earlier forecasts are compared with the actual counts."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np

from benchmarks.forecast.patterns import Series
from vllm_omni_sched.monitor.forecast.load import Forecast, ForecastOptions, LoadForecast

QUANTILES = (0.1, 0.5, 0.9)


def follow(series: Series, options: ForecastOptions, first: int) -> dict[str, Any]:
    """Return the errors of forecasts ``horizon_bins`` ahead from bin ``first`` on, beside naive and seasonal naive.

    Seasonal naive is left out if ``first`` is within the first season. MAPE: of bins with arrivals. WQL: pinball loss
    at `QUANTILES`, by the arrivals; those of the others are of their one value. MASE: mean absolute error by that of
    the naive forecast of the next bin, before ``first``. The forecast is made when a bin begins, so its last step is
    ``horizon_bins - 1`` bins after that one; naive then knows the bin before.
    """
    forecast = LoadForecast(options)
    steps, season = options.horizon_bins, options.season_bins
    pending: deque[tuple[Forecast, float]] = deque()
    errors: dict[str, list[float]] = {"ours": [], "naive": []} | ({"seasonal_naive": []} if first >= season else {})
    losses, inside, models = [], [], Counter[str]()
    for at, count in enumerate(series):
        now = at * options.bin_seconds
        last = float(series[at - 1]) if at else 0.0
        pending.append((forecast.forecast(now, "image"), last))
        forecast.observe(now, "image", float(count))
        if len(pending) < steps:
            continue
        forecast_made, naive = pending.popleft()
        if at < first:
            continue
        errors["ours"].append(abs(count - forecast_made.mean[-1]))
        errors["naive"].append(abs(count - naive))
        if first >= season:
            errors["seasonal_naive"].append(abs(count - series[at - season]))
        bounds = (forecast_made.low[-1], forecast_made.mean[-1], forecast_made.high[-1])
        losses.append(sum(_loss(float(count), bound, tau) for bound, tau in zip(bounds, QUANTILES, strict=True)))
        inside.append(bounds[0] <= count <= bounds[2])
        models[f"{forecast_made.model.value} ({forecast_made.reason.value})"] += 1
    scale = float(np.abs(np.diff(series[:first])).mean())
    mase = {name: float(np.mean(values)) / scale for name, values in errors.items()}
    scored = series[first:]
    some = scored > 0
    return {
        "mase": mase,
        "mape": {name: float(np.mean(np.array(values)[some] / scored[some])) for name, values in errors.items()},
        "wql": float(sum(losses) / len(QUANTILES) / scored.sum()),
        **{f"{name}_wql": float(sum(values) / scored.sum()) for name, values in errors.items() if name != "ours"},
        "coverage": float(np.mean(inside)),
        "fits": forecast.fits,
        "spoke": {name: round(times / len(inside), 3) for name, times in models.most_common()},
    }


def _loss(actual: float, bound: float, tau: float) -> float:
    return 2 * max(tau * (actual - bound), (tau - 1) * (actual - bound))

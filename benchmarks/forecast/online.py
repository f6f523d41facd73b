"""The forecast as it runs: each bin is told once, and what was said before is compared with what came."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import numpy as np

from benchmarks.forecast.patterns import Series
from vllm_omni_sched.monitor.forecast import Forecast, ForecastOptions, LoadForecast

QUANTILES = (0.1, 0.5, 0.9)


def follow(series: Series, options: ForecastOptions, first: int) -> dict[str, Any]:
    """How forecasts ``horizon_bins`` ahead did for the bins from ``first`` on, beside naive and seasonal naive.

    MASE: mean absolute error by that of the naive forecast of the next bin, before ``first``. The forecast is made when
    a bin begins, so its last step is ``horizon_bins - 1`` bins after that one; naive then knows the bin before.
    """
    forecast = LoadForecast(options)
    steps, season = options.horizon_bins, options.season_bins
    said: deque[tuple[Forecast, float]] = deque()
    errors: dict[str, list[float]] = {"ours": [], "naive": [], "seasonal_naive": []}
    losses, inside, spoke = [], [], Counter[str]()
    for at, count in enumerate(series):
        now = at * options.bin_seconds
        last = float(series[at - 1]) if at else 0.0
        said.append((forecast.forecast(now, "image"), last))
        forecast.observe(now, "image", float(count))
        if len(said) < steps:
            continue
        told, naive = said.popleft()
        if at < first:
            continue
        errors["ours"].append(abs(count - told.mean[-1]))
        errors["naive"].append(abs(count - naive))
        errors["seasonal_naive"].append(abs(count - series[at - season]))
        bounds = (told.low[-1], told.mean[-1], told.high[-1])
        losses.append(sum(_loss(float(count), bound, tau) for bound, tau in zip(bounds, QUANTILES, strict=True)))
        inside.append(bounds[0] <= count <= bounds[2])
        spoke[f"{told.model.value} ({told.reason.value})"] += 1
    scale = float(np.abs(np.diff(series[:first])).mean())
    mase = {name: float(np.mean(values)) / scale for name, values in errors.items()}
    return {
        "mase": mase,
        "wql": float(sum(losses) / len(QUANTILES) / series[first:].sum()),
        "naive_wql": float(sum(errors["naive"]) / series[first:].sum()),
        "coverage": float(np.mean(inside)),
        "fits": forecast.fits,
        "spoke": {name: round(times / len(inside), 3) for name, times in spoke.most_common()},
    }


def _loss(actual: float, bound: float, tau: float) -> float:
    return 2 * max(tau * (actual - bound), (tau - 1) * (actual - bound))

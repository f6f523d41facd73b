"""Find the model that would have forecast a history best."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vllm_omni_sched.monitor.forecast.models import ModelChoice, Series, choices, fit

QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Score:
    """Errors of a model in a back-test.

    ``mase``: mean absolute error relative to that of the naive one-step forecast in the training part (Hyndman and
    Koehler, 2006). ``wql``: mean weighted quantile loss at 10, 50 and 90%. ``coverage``: values within 10 and 90%.
    ``quantiles``: of the errors, on square roots, one row per step ahead; the intervals are made from them.
    """

    mae: float
    mase: float
    wql: float
    coverage: float
    quantiles: Series


def rolling_origin(history: Series, season: int, steps: int, holdout: int) -> Mapping[ModelChoice, Score]:
    """Forecast the last ``holdout`` values from every origin in them, ``steps`` ahead, by every model.

    Models are fitted once, before the first origin, and are then updated value by value: none sees the values
    it forecasts. The intervals of the first half of the origins are scored on the second (split conformal,
    Vovk et al., 2005); the returned quantiles are of all origins.

    Raises:
        ValueError: not ``1 <= steps``, or fewer than ``steps + 3`` values are held out, or fewer than 2 are left.
    """
    cut = len(history) - holdout
    if steps < 1 or holdout < steps + 3 or cut < 2:
        raise ValueError(f"cannot forecast {steps} steps in the last {holdout} of {len(history)} values")
    roots = np.sqrt(np.maximum(history, 0.0))
    scale = max(float(np.abs(np.diff(history[:cut])).mean()), 1e-9)
    origins = range(cut, len(history) - steps + 1)
    actual = np.stack([roots[origin : origin + steps] for origin in origins])
    scores = {}
    for choice in choices(cut, season):
        model = fit(choice, roots[:cut], season)
        forecasts = np.empty_like(actual)
        for row, origin in enumerate(origins):
            forecasts[row] = model.predict(steps)
            model.update(float(roots[origin]))
        scores[choice] = _score(actual, forecasts, scale)
    return scores


def _score(actual: Series, forecasts: Series, scale: float) -> Score:
    errors = actual - forecasts
    first = len(errors) // 2
    learned = np.quantile(errors[:first], QUANTILES, axis=0)
    rest = actual[first:] ** 2
    bounds = np.maximum(forecasts[None, first:] + learned[:, None], 0.0) ** 2
    missed = rest[None] - bounds
    tau = np.array(QUANTILES)[:, None, None]
    loss = 2 * np.maximum(tau * missed, (tau - 1) * missed)
    mae = float(np.abs(actual**2 - np.maximum(forecasts, 0.0) ** 2).mean())
    return Score(
        mae=mae,
        mase=mae / scale,
        wql=float(loss.sum() / len(QUANTILES) / max(float(rest.sum()), 1e-9)),
        coverage=float(((rest >= bounds[0]) & (rest <= bounds[2])).mean()),
        quantiles=np.quantile(errors, QUANTILES, axis=0),
    )

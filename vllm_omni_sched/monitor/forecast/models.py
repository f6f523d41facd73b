"""Model a series of counts with seasons. statsmodels fits the models; an update costs a few additions.

All models work on square roots, where counts of any size have about the same noise (Bartlett, 1936), and a forecast
below zero cannot come back.
"""

import importlib
import math
import warnings
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.extras import how_to_install

Series = NDArray[np.float64]


class ModelChoice(str, Enum):
    """Forecast model."""

    NAIVE = "naive"  # the last value
    SEASONAL_NAIVE = "seasonal_naive"  # the value of one season ago
    ETS = "ets"  # a level with a damped trend
    STL_ETS = "stl_ets"  # a level plus the usual deviation at this time of the season


class Model(Protocol):
    """A model fitted to a history that is updated count by count. All values are square roots."""

    def update(self, value: float) -> None: ...

    def predict(self, steps: int) -> Series:
        """Return the next ``steps`` values."""


class Naive:
    """Forecasts the last value."""

    def __init__(self, history: Series) -> None:
        self._last = float(history[-1])

    def update(self, value: float) -> None:
        self._last = value

    def predict(self, steps: int) -> Series:
        return np.full(steps, self._last)


class SeasonalNaive:
    """Forecasts the value of one season ago."""

    def __init__(self, history: Series, season: int) -> None:
        self._season = np.array(history[-season:])
        self._at = 0

    def update(self, value: float) -> None:
        self._season[self._at] = value
        self._at = (self._at + 1) % len(self._season)

    def predict(self, steps: int) -> Series:
        return np.take(self._season, self._at + np.arange(steps), mode="wrap")


@dataclass
class Smooth:
    """ETS(A,Ad,N) or ETS(A,N,N) in its own terms (Hyndman et al., "Forecasting with Exponential Smoothing", 2008)."""

    level: float
    slope: float
    alpha: float
    beta: float
    damping: float

    @classmethod
    def fit(cls, history: Series, *, trend: bool) -> "Smooth":
        """Fit the model to a history of square roots.

        Raises:
            ConfigError: statsmodels is not installed.
        """
        ets = require("statsmodels.tsa.exponential_smoothing.ets")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the back-test judges a fit that has not converged like any other
            model = ets.ETSModel(history, trend="add" if trend else None, damped_trend=trend)
            fitted = model.fit(disp=False, maxiter=100)
        parameters: dict[str, float] = dict(zip(model.param_names, map(float, fitted.params), strict=True))
        smooth = cls(
            parameters["initial_level"],
            parameters.get("initial_trend", 0.0),
            parameters["smoothing_level"],
            parameters.get("smoothing_trend", 0.0),
            parameters.get("damping_trend", 0.0),
        )
        for value in history:
            smooth.update(float(value))
        return smooth

    def update(self, value: float) -> None:
        before = self.level + self.damping * self.slope
        error = value - before
        self.level = before + self.alpha * error
        self.slope = self.damping * self.slope + self.beta * error

    def predict(self, steps: int) -> Series:
        damped = np.cumsum(self.damping ** np.arange(1, steps + 1))
        return np.asarray(self.level + self.slope * damped, dtype=np.float64)


class SeasonalSmooth:
    """A level by ETS under the seasonal part of STL (Cleveland et al., 1990), robust to single bursts."""

    def __init__(self, history: Series, season: int) -> None:
        stl = require("statsmodels.tsa.seasonal")
        # Nearly periodic: a season's shape moves slowly, and each phase is seen only once a season.
        parts = stl.STL(history, period=season, seasonal=2 * (len(history) // season) + 5, robust=True).fit(
            inner_iter=1, outer_iter=4
        )
        self._shape: Series = np.asarray(parts.seasonal[-season:], dtype=np.float64)
        self._at = 0
        self._level = Smooth.fit(history - np.asarray(parts.seasonal), trend=False)

    def update(self, value: float) -> None:
        self._level.update(value - float(self._shape[self._at]))
        self._at = (self._at + 1) % len(self._shape)

    def predict(self, steps: int) -> Series:
        usual = np.take(self._shape, self._at + np.arange(steps), mode="wrap")
        predicted: Series = np.maximum(self._level.predict(steps) + usual, 0.0)
        return predicted


def fit(choice: ModelChoice, history: Series, season: int) -> Model:
    """Fit a model to ``history`` (square roots); the seasonal ones need two seasons.

    Raises:
        ConfigError: the model is ETS or STL_ETS, and statsmodels is not installed.
    """
    if choice is ModelChoice.NAIVE:
        return Naive(history)
    if choice is ModelChoice.SEASONAL_NAIVE:
        return SeasonalNaive(history, season)
    if choice is ModelChoice.ETS:
        return Smooth.fit(history, trend=True)
    return SeasonalSmooth(history, season)


def choices(length: int, season: int) -> tuple[ModelChoice, ...]:
    """Return the models that a history of this length allows, the simple ones first."""
    found = [ModelChoice.NAIVE]
    if season > 1 and length >= 2 * season:
        found.append(ModelChoice.SEASONAL_NAIVE)
    if length >= 24:
        found.append(ModelChoice.ETS)
    if ModelChoice.SEASONAL_NAIVE in found and length >= 24:
        found.append(ModelChoice.STL_ETS)
    return tuple(found)


def require(module: str) -> Any:
    """Import a module of statsmodels when it is first needed, which takes seconds.

    Raises:
        ConfigError: statsmodels is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"forecast needs statsmodels: {how_to_install('forecast')}") from error


def root(count: float) -> float:
    """Return the square root of a count, the scale of the models."""
    return math.sqrt(max(count, 0.0))

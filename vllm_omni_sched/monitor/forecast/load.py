"""Forecast the load of each modality from counts of arrivals."""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.extras import how_to_install
from vllm_omni_sched.monitor.forecast.backtest import rolling_origin
from vllm_omni_sched.monitor.forecast.guard import Guard
from vllm_omni_sched.monitor.forecast.history import ArrivalHistory, continued
from vllm_omni_sched.monitor.forecast.models import Model, ModelChoice, Naive, Series, fit, root


class ForecastReason(str, Enum):
    """Reason for the model in use."""

    NO_HISTORY = "no_history"  # no complete bin yet
    SHORT_HISTORY = "short_history"  # too few bins for a back-test
    BEST = "best"  # in the last back-test
    GUARDED = "guarded"  # the best of the back-test was recently worse than naive
    QUIET = "quiet"  # all values of the history are equal


@dataclass(frozen=True)
class ForecastOptions:
    """Options of the load forecast. ``bin_seconds``: width of a bin of counts. ``season_bins``: a day, say; 1 for none.

    ``horizon_seconds``: how far ahead models are compared and the guard looks. ``seasons_kept``: length of the history.
    ``refit_bins``: bins between two fits, each of which costs at most fitting every model once.
    ``margin``: a model must beat naive by that fraction in the back-test. ``guarded``: use the guard; without it, the
    best of the last back-test is used whatever its later errors, which is for studies of the guard alone.
    """

    bin_seconds: float = 60.0
    season_bins: int = 1440
    horizon_seconds: float = 600.0
    seasons_kept: int = 7
    refit_bins: int = 240
    margin: float = 0.05
    guard_window: int = 60
    guarded: bool = True

    @property
    def horizon_bins(self) -> int:
        return max(1, math.ceil(self.horizon_seconds / self.bin_seconds))

    @property
    def kept_bins(self) -> int:
        return max(self.seasons_kept * self.season_bins, 512)


@dataclass(frozen=True)
class Forecast:
    """Expected arrivals per bin, the present bin first; 80% of the values lie between ``low`` and ``high``."""

    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    model: ModelChoice
    reason: ForecastReason


@dataclass(slots=True)
class _Series:
    bin: int
    guard: Guard
    counts: deque[float]
    count: float = 0.0  # of the present bin
    naive: Naive | None = None
    model: Model | None = None
    choice: ModelChoice = ModelChoice.NAIVE
    reason: ForecastReason = ForecastReason.NO_HISTORY
    quantiles: dict[ModelChoice, Series] = field(default_factory=dict)
    since_fit: int = 0
    pending: deque[tuple[float, float]] = field(default_factory=deque)  # forecasts for the bins to come


class LoadForecast:
    """Forecasts arrivals of each modality.

    1. Counts go into bins of ``bin_seconds``; bins without arrivals count as zero.
    2. Every ``refit_bins``, all models are compared by a back-test on the last season (or third of the history). The
       one with the least absolute error is fitted and used if it beats naive by ``margin``. Between fits, it takes each
       count without a fit.
    3. A `Guard` compares it with naive at ``horizon_seconds`` ahead; while it is worse, naive is used.
    4. A history of an earlier process (`restore`) is used as if it had been observed here. Bins in between, in which
       nothing was observed, are filled by `continued`.

    Raises:
        ConfigError: statsmodels is not installed.
    """

    def __init__(self, options: ForecastOptions | None = None) -> None:
        self.options = options or ForecastOptions()
        self.fits = 0
        self._series: dict[str, _Series] = {}
        # Checked when it is configured, not hours later.
        import_statsmodels()

    def observe(self, now: float, modality: str, count: float = 1.0) -> None:
        """Record arrivals. Arrivals of a bin that is over are counted in the present one."""
        self._upto(now, modality).count += count

    def history(self, now: float, wall: float) -> ArrivalHistory:
        """Return the bins that are over.

        Args:
            wall: wall-clock time of ``now``.
        """
        for modality in list(self._series):
            self._upto(now, modality)
        counts = {modality: tuple(series.counts) for modality, series in self._series.items()}
        return ArrivalHistory(self.options.bin_seconds, wall - now % self.options.bin_seconds, counts)

    def restore(self, history: ArrivalHistory, now: float, wall: float) -> None:
        """Take over the history of an earlier process, before anything is observed; arguments as for `history`.

        Raises:
            ConfigError: its bins have another width, or it is older than what is kept.
        """
        options = self.options
        if history.bin_seconds != options.bin_seconds:
            raise ConfigError(
                f"its bins have {history.bin_seconds:g} s, and option 'bin_seconds' is {options.bin_seconds:g}"
            )
        missed = max(round((wall - now % options.bin_seconds - history.until) / options.bin_seconds), 0)
        if missed > options.kept_bins:
            raise ConfigError(f"it ends {missed} bins ago, and {options.kept_bins} are kept")
        at = math.floor(now / options.bin_seconds)
        for modality, before in history.counts.items():
            if not before or modality in self._series:
                continue
            counts = deque(continued(before, missed, options.season_bins), maxlen=options.kept_bins)
            series = _Series(at, Guard(options.guard_window), counts)
            series.naive = series.model = Naive(np.sqrt(np.array(counts)))
            series.reason, series.since_fit = ForecastReason.SHORT_HISTORY, len(counts)
            self._series[modality] = series

    def forecast(self, now: float, modality: str) -> Forecast:
        """Return the forecast for the horizon; naive for a modality never seen."""
        options = self.options
        steps = options.horizon_bins
        series = self._upto(now, modality)
        if series.naive is None or series.model is None:
            return Forecast((0.0,) * steps, (0.0,) * steps, (0.0,) * steps, ModelChoice.NAIVE, series.reason)
        model, choice, reason = series.model, series.choice, series.reason
        if options.guarded and not series.guard.trusted and choice is not ModelChoice.NAIVE:
            model, choice, reason = series.naive, ModelChoice.NAIVE, ForecastReason.GUARDED
        middle = model.predict(steps)
        low, high = _interval(middle, series.quantiles.get(choice))
        return Forecast(_squares(middle), _squares(low), _squares(high), choice, reason)

    def _upto(self, now: float, modality: str) -> _Series:
        """Close the bins that are over, and return the modality's series."""
        options, at = self.options, math.floor(now / self.options.bin_seconds)
        series = self._series.get(modality)
        if series is None:
            series = _Series(at, Guard(options.guard_window), deque(maxlen=options.kept_bins))
            self._series[modality] = series
        if at - series.bin > options.kept_bins:  # no call for longer than the history is kept
            series.bin = at - options.kept_bins
        while series.bin < at:
            self._close(series)
        # At most once per call, however many bins were closed.
        if series.since_fit >= _next_fit(self.options, len(series.counts)):
            self._refit(series)
        return series

    def _close(self, series: _Series) -> None:
        count, series.count = series.count, 0.0
        series.bin += 1
        series.counts.append(count)
        value = root(count)
        if series.naive is None or series.model is None:
            series.naive = series.model = Naive(np.array([value]))
            series.reason = ForecastReason.SHORT_HISTORY
        else:
            series.naive.update(value)
            if series.model is not series.naive:
                series.model.update(value)
        self._judge(series, count)
        series.since_fit += 1

    def _judge(self, series: _Series, count: float) -> None:
        assert series.model is not None
        steps = self.options.horizon_bins
        if len(series.pending) == steps:
            model, naive = series.pending.popleft()
            if series.choice is not ModelChoice.NAIVE:
                series.guard.observe(count, model, naive)
        series.pending.append((max(float(series.model.predict(steps)[-1]), 0.0) ** 2, count))

    def _refit(self, series: _Series) -> None:
        options, history = self.options, np.array(series.counts)
        series.since_fit = 0
        steps = options.horizon_bins
        holdout = min(max(options.season_bins, steps + 30), len(history) // 3)
        if holdout < steps + 3 or len(history) < 30:
            return
        if np.ptp(history) == 0:
            series.model = series.naive
            series.choice, series.reason = ModelChoice.NAIVE, ForecastReason.QUIET
            return
        self.fits += 1
        scores = rolling_origin(history, options.season_bins, steps, holdout)
        series.quantiles = {choice: score.quantiles for choice, score in scores.items()}
        best = min(scores, key=lambda choice: scores[choice].mae)
        if scores[best].mae > (1 - options.margin) * scores[ModelChoice.NAIVE].mae:
            best = ModelChoice.NAIVE
        if best is not series.choice:
            series.guard.reset()
            series.pending.clear()
        series.choice, series.reason = best, ForecastReason.BEST
        naive = best is ModelChoice.NAIVE
        series.model = series.naive if naive else fit(best, np.sqrt(history), options.season_bins)


def _next_fit(options: ForecastOptions, length: int) -> int:
    """Return the bins until the next fit: fewer while the history is short, and never more than doubling it."""
    return min(options.refit_bins, max(30, length // 2))


def import_statsmodels() -> None:
    """Check that statsmodels is installed.

    Raises:
        ConfigError: it is not installed.
    """
    from importlib.util import find_spec

    if find_spec("statsmodels") is None:
        raise ConfigError(f"forecast needs statsmodels: {how_to_install('forecast')}")


def _interval(middle: Series, quantiles: Series | None) -> tuple[Series, Series]:
    steps = len(middle)
    if quantiles is None:  # Poisson counts at a constant rate: square roots have a standard deviation of a half, twice
        half = 1.2816 * math.sqrt(0.5)
        return middle - half, middle + half
    # Further ahead than was back-tested, the last step's errors are the best known.
    step = np.minimum(np.arange(steps), quantiles.shape[1] - 1)
    return middle + np.minimum(quantiles[0][step], 0.0), middle + np.maximum(quantiles[2][step], 0.0)


def _squares(values: Series) -> tuple[float, ...]:
    return tuple(float(value) for value in np.maximum(values, 0.0) ** 2)

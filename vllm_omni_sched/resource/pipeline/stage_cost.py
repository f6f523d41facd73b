"""Learn the cost of a request in each stage from past requests."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields

from vllm_omni_sched.config.errors import ConfigError

_INF = math.inf


class NonNegativeFit:
    """y = weights . x through recent points, for x, y >= 0; O(k²) per point, with k regressors that were ever non-zero.

    1. The moments of the points fade by ``forgetting``; the ridge towards ``prior`` does not. So a direction that
       no point has had for long returns to the prior, and nothing winds up as in plain recursive least squares.
    2. A point has the weight 1 / predicted y: the spread of durations grows with them.
    3. After the first ``_FREE`` points, a residual counts as at most ``_CLIP`` times the usual one (Huber, 1964).
    4. The minimum over weights >= 0 is sought by coordinate descent from the last one, a few sweeps for each point. A
       sweep that moves no weight by more than ``_STILL`` of the usual residual is the last one.

    ``sweeps``: number so far.
    """

    _FREE = 8
    _CLIP = 3.0
    _RIDGE = 0.01
    _SWEEPS = 6
    _STILL = 0.01
    _LEAST = 1e-3  # in units of y: predictions below this have equal weight
    _SPREAD = 0.05  # fraction of y: a residual that always counts as usual

    def __init__(self, prior: Sequence[float], forgetting: float) -> None:
        self.weights = list(prior)
        self._prior = tuple(prior)
        self._forgetting = forgetting
        self._shown: list[int] = []  # sorted; the other regressors have zero moments and the prior's weights
        # moments of those that are shown, in their order
        self._xx: list[list[float]] = []  # without the diagonal, which is in `_squares`
        self._squares: list[float] = []
        self._xy: list[float] = []
        self._pulls: list[float] = []  # of the ridge
        self.sweeps = 0
        self._usual = 0.0  # mean absolute residual, after clipping
        self._count = 0

    def predict(self, x: Sequence[float]) -> float:
        """Return the predicted y."""
        return _dot(self.weights, x)

    def has_seen(self, regressor: int) -> bool:
        """Return whether the regressor was above 0 in any point so far; if not, its weight is that of the prior."""
        return regressor in self._shown

    def add(self, x: Sequence[float], y: float) -> None:
        """Add a point."""
        predicted = self.predict(x)
        y = self._clipped(predicted, y)
        # A prediction from the prior alone may be far too low: it must not give the first points a lasting weight.
        weight = 1 / max(predicted, y if self._count < self._FREE else 0.0, self._LEAST)
        self._count += 1
        if len(self._shown) < len(x):
            for i, value in enumerate(x):
                if value and i not in self._shown:
                    self._show(i)
        keeps, rows, squares, xy = self._forgetting, self._xx, self._squares, self._xy
        values = [x[i] for i in self._shown]
        for at, one in enumerate(values):
            part = weight * one
            row = rows[at] = [keeps * moment + part * value for moment, value in zip(rows[at], values, strict=True)]
            row[at] = 0.0
            squares[at] = keeps * squares[at] + part * one
            xy[at] = keeps * xy[at] + part * y
        self._descend()

    def _show(self, regressor: int) -> None:
        """Make room for the moments of a regressor that was 0 in all points so far."""
        at = bisect_left(self._shown, regressor)
        self._shown.insert(at, regressor)
        for row in self._xx:
            row.insert(at, 0.0)
        self._xx.insert(at, [0.0] * len(self._shown))
        self._squares.insert(at, 0.0)
        self._xy.insert(at, 0.0)
        self._pulls.insert(at, self._RIDGE * self._prior[regressor])

    def _clipped(self, predicted: float, y: float) -> float:
        residual = y - predicted
        if self._count < self._FREE:
            self._usual += (abs(residual) - self._usual) / (self._count + 1)
            return y
        most = self._CLIP * max(self._usual, self._SPREAD * predicted, self._LEAST * self._SPREAD)
        residual = min(max(residual, -most), most)
        self._usual += 0.1 * (abs(residual) - self._usual)
        return max(predicted + residual, 0.0)

    def _descend(self) -> None:
        ridge, still = self._RIDGE, self._STILL * self._usual
        weights = [self.weights[i] for i in self._shown]
        rows = [*zip(range(len(weights)), self._xx, self._xy, self._pulls, self._squares, strict=True)]
        for _ in range(self._SWEEPS):
            self.sweeps += 1
            moves = False
            for at, row, xy, pull, square in rows:
                known = 0.0
                for moment, weight in zip(row, weights, strict=True):
                    known += moment * weight
                best = (xy - known + pull) / (square + ridge)
                if best < 0.0:
                    best = 0.0
                if not -still <= best - weights[at] <= still:
                    moves = True
                weights[at] = best
            if not moves:
                break
        for i, value in zip(self._shown, weights, strict=True):
            self.weights[i] = value


def _dot(weights: Sequence[float], x: Sequence[float]) -> float:
    total = 0.0
    for weight, value in zip(weights, x, strict=True):
        total += weight * value
    return total


@dataclass(frozen=True)
class Features:
    """Size of a request for a stage. All are counts of that request; ``pixels`` of all its images and frames.

    ``output_tokens`` is the expected number until it is known; ``steps``: denoising steps.

    Raises:
        ValueError: one of them is negative or not finite.
    """

    prompt_tokens: float = 0
    output_tokens: float = 0
    items: float = 0
    pixels: float = 0
    audio_seconds: float = 0.0
    steps: float = 0

    def __post_init__(self) -> None:
        if (  # one condition, since many are made
            0 <= self.prompt_tokens < _INF
            and 0 <= self.output_tokens < _INF
            and 0 <= self.items < _INF
            and 0 <= self.pixels < _INF
            and 0 <= self.audio_seconds < _INF
            and 0 <= self.steps < _INF
        ):
            return
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < _INF:
                raise ValueError(f"{field.name} must be finite and >= 0, got {value}")


@dataclass(frozen=True)
class CostPrior:
    """Seconds per unit before a stage was timed: the right order of magnitude for a small model on one device.

    Raises:
        ConfigError: one of them is negative or not finite.
    """

    per_request: float = 0.005
    per_prompt_token: float = 1e-4
    per_output_token: float = 0.01
    per_item: float = 0.02
    per_pixel: float = 1e-8
    per_audio_second: float = 0.01
    per_pixel_step: float = 2e-8

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{field.name} must be finite and >= 0 seconds, got {value}")


# One unit of each regressor, so that all are about 1 for a usual request and one ridge suits them all.
_UNITS = (1.0, 1e3, 1e2, 1.0, 1e6, 10.0, 1e7)
_OUTPUT = 2
_ENCODED = (3, 4, 5)  # items, pixels and seconds of audio: what the encoder of a stage computes
_OUTLIVED = 0.1  # of the tokens it has made: further tokens expected of a request that is longer than expected


class StageCosts:
    """Estimates seconds per request and stage: linear in the features, with weights that are never negative.

    1. Least squares with exponential forgetting and a ridge towards the prior (Åström and Wittenmark,
       "Adaptive Control", 2.2): directions that the observations do not determine keep the prior.
    2. An outlier counts as a less extreme one (Huber, 1964). A lasting change is
       followed within some tens of observations: the usual residual grows with it.
    3. An estimate lies in ``[0, max_seconds]``; a stage that was never timed costs what the prior gives.

    Args:
        forgetting: weight that an observation keeps after the next one, in (0, 1).
        max_seconds: upper bound of estimates and of observations.
    """

    def __init__(self, prior: CostPrior | None = None, forgetting: float = 0.98, max_seconds: float = 3600.0) -> None:
        self.max_seconds = max_seconds
        self._forgetting = forgetting
        weights = astuple(prior or CostPrior())
        self._prior = [weight * unit for weight, unit in zip(weights, _UNITS, strict=True)]
        self._fits: dict[str, NonNegativeFit] = {}

    def estimate(self, stage_id: str, features: Features) -> float:
        """Return the expected seconds of the request in the stage."""
        weights = self._weights(stage_id)
        return min(_dot(weights, _regressors(features)), self.max_seconds)

    def encode_seconds(self, stage_id: str, features: Features) -> float | None:
        """Return how many of the expected seconds go by the request's items, their pixels and their audio.

        None while the stage was not timed with such items: only the prior tells then.
        """
        fit, x = self._fits.get(stage_id), _regressors(features)
        if fit is None or not all(fit.has_seen(i) for i in _ENCODED if x[i]):
            return None
        return min(sum(fit.weights[i] * x[i] for i in _ENCODED), self.max_seconds)

    def observe(self, stage_id: str, features: Features, seconds: float) -> None:
        """Record that a request with these features took so long in the stage; ``output_tokens`` is the actual number.

        Raises:
            ValueError: ``seconds`` is negative or not finite.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be finite and >= 0, got {seconds}")
        fit = self._fits.get(stage_id)
        if fit is None:
            fit = self._fits[stage_id] = NonNegativeFit(self._prior, self._forgetting)
        fit.add(_regressors(features), min(seconds, self.max_seconds))

    def remaining(self, stage_id: str, features: Features, done_output_tokens: float) -> float:
        """Return the expected seconds left of a request that has made so many output tokens.

        Once it makes output, only the remaining tokens count. One that has made more than expected will make more:
        lengths of answers have a long tail.

        Raises:
            ValueError: ``done_output_tokens`` is negative or not finite.
        """
        if not 0 <= done_output_tokens < math.inf:
            raise ValueError(f"done_output_tokens must be finite and >= 0, got {done_output_tokens}")
        if done_output_tokens == 0:
            return self.estimate(stage_id, features)
        left = max(features.output_tokens - done_output_tokens, _OUTLIVED * done_output_tokens)
        return min(self._weights(stage_id)[_OUTPUT] * left / _UNITS[_OUTPUT], self.max_seconds)

    def is_measured(self, stage_id: str) -> bool:
        """Return whether the stage was timed at all."""
        return stage_id in self._fits

    def _weights(self, stage_id: str) -> list[float]:
        fit = self._fits.get(stage_id)
        return self._prior if fit is None else fit.weights


def _regressors(features: Features) -> list[float]:
    _, prompt, output, items, pixels, audio, work = _UNITS
    return [
        1.0,
        features.prompt_tokens / prompt,
        features.output_tokens / output,
        features.items / items,
        features.pixels / pixels,
        features.audio_seconds / audio,
        features.pixels * features.steps / work,
    ]

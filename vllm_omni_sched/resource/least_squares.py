"""Fit non-negative weights by least squares with forgetting and a prior."""

from collections.abc import Sequence
from operator import mul


class NonNegativeFit:
    """y = weights . x through recent points, for x, y >= 0; O(k²) per point, with k regressors that were ever non-zero.

    1. The moments of the points fade by ``forgetting``; the ridge towards ``prior`` does not. So a direction that
       no point has had for long returns to the prior, and nothing winds up as in plain recursive least squares.
    2. A point has the weight 1 / predicted y: the spread of durations grows with them.
    3. After the first ``_FREE`` points, a residual counts as at most ``_CLIP`` times the usual one (Huber, 1964).
    4. The minimum over weights >= 0 is sought by coordinate descent from the last one, a few sweeps for each point.
    """

    _FREE = 8
    _CLIP = 3.0
    _RIDGE = 0.01
    _SWEEPS = 6
    _LEAST = 1e-3  # in units of y: predictions below this have equal weight
    _SPREAD = 0.05  # fraction of y: a residual that always counts as usual

    def __init__(self, prior: Sequence[float], forgetting: float) -> None:
        size = len(prior)
        self.weights = list(prior)
        self._prior = tuple(prior)
        self._forgetting = forgetting
        self._shown: list[int] = []  # sorted; the other regressors have zero moments and the prior's weights
        self._xx = [[0.0] * size for _ in range(size)]  # without the diagonal, which is in `_squares`
        self._squares = [0.0] * size
        self._xy = [0.0] * size
        self._usual = 0.0  # mean absolute residual, after clipping
        self._count = 0

    def predict(self, x: Sequence[float]) -> float:
        """Return the predicted y."""
        predicted: float = sum(map(mul, self.weights, x))
        return predicted

    def add(self, x: Sequence[float], y: float) -> None:
        """Add a point."""
        predicted = self.predict(x)
        y = self._clipped(predicted, y)
        # A prediction from the prior alone may be far too low: it must not give the first points a lasting weight.
        weight = 1 / max(predicted, y if self._count < self._FREE else 0.0, self._LEAST)
        self._count += 1
        if len(self._shown) < len(x):
            self._shown = [i for i, value in enumerate(x) if value or self._squares[i]]
        keeps = self._forgetting
        for i in self._shown:
            part = weight * x[i]
            row = self._xx[i] = [keeps * moment + part * value for moment, value in zip(self._xx[i], x, strict=True)]
            row[i] = 0.0
            self._squares[i] = keeps * self._squares[i] + part * x[i]
            self._xy[i] = keeps * self._xy[i] + part * y
        self._descend()

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
        weights, ridge = self.weights, self._RIDGE
        rows = [(i, self._xx[i], self._xy[i], ridge * self._prior[i], self._squares[i] + ridge) for i in self._shown]
        for _ in range(self._SWEEPS):
            for i, row, xy, pull, square in rows:
                best = (xy - sum(map(mul, row, weights)) + pull) / square
                weights[i] = best if best > 0 else 0.0

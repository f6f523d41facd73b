"""The fit says what one does that goes through all moments, shown or not."""

import random

from vllm_omni_sched.resource.pipeline.stage_cost import NonNegativeFit

PRIOR = (0.005, 0.1, 1.0, 0.02, 0.01, 0.1, 0.2)


class SweepingFit(NonNegativeFit):
    """Fit that makes all sweeps, whatever they move."""

    _STILL = 0.0


class PlainFit(SweepingFit):
    """Reference fit that keeps all moments in one matrix."""

    def __init__(self, prior, forgetting):
        super().__init__(prior, forgetting)
        self.moments = [[0.0] * len(prior) for _ in prior]
        self.with_y = [0.0] * len(prior)

    def _clipped(self, predicted, y):
        self.y = super()._clipped(predicted, y)
        return self.y

    def _descend(self):
        keeps, x, weight = self._forgetting, self.x, self.weight
        for i, row in enumerate(self.moments):
            self.with_y[i] = keeps * self.with_y[i] + weight * x[i] * self.y
            for j in range(len(row)):
                row[j] = keeps * row[j] + weight * x[i] * x[j]
        for _ in range(self._SWEEPS):
            for i, row in enumerate(self.moments):
                rest = sum(row[j] * self.weights[j] for j in range(len(row)) if j != i)
                best = (self.with_y[i] - rest + self._RIDGE * self._prior[i]) / (row[i] + self._RIDGE)
                self.weights[i] = max(best, 0.0)

    def add(self, x, y):
        predicted = max(self.predict(x), y if self._count < self._FREE else 0.0, self._LEAST)
        self.x, self.weight = x, 1 / predicted
        super().add(x, y)


def test_what_no_point_has_shown_stays_as_the_prior_has_it_and_the_rest_is_as_by_all_moments():
    rng, fit, plain = random.Random(5), SweepingFit(PRIOR, 0.98), PlainFit(PRIOR, 0.98)
    for number in range(300):
        late = rng.random() if number > 100 else 0.0
        x = [1.0, 3 * rng.random(), 1.28, float(rng.randint(0, 3)), late, 0.0, 0.0]
        y = 0.7 * x[0] + 0.2 * x[1] + 0.3 * x[3] + 0.5 * late
        fit.add(x, y)
        plain.add(x, y)
        assert all(abs(a - b) < 1e-12 for a, b in zip(fit.weights, plain.weights, strict=True))
        assert fit.weights[5:] == list(PRIOR[5:])
    assert abs(fit.weights[4] - 0.5) < 0.05


def test_once_the_fit_stands_still_few_sweeps_find_what_all_find():
    rng, fit, all_sweeps = random.Random(7), NonNegativeFit(PRIOR, 0.98), SweepingFit(PRIOR, 0.98)
    for number in range(400):
        if number == 200:
            assert all_sweeps.sweeps == 200 * 6
            before = fit.sweeps
        x = [1.0, 3 * rng.random(), 1.28, float(rng.randint(0, 3)), 0.0, 0.0, 0.0]
        y = (0.7 * x[0] + 0.2 * x[1] + 0.3 * x[3]) * rng.uniform(0.5, 1.5)
        fit.add(x, y)
        all_sweeps.add(x, y)
        if number >= 200:
            # a few per cent of the noise, which is a quarter of y in the mean
            assert abs(fit.predict(x) - all_sweeps.predict(x)) < 0.05 * 0.25 * all_sweeps.predict(x)
    assert fit.sweeps - before < 200 * 3

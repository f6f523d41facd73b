"""Vary the times of steps as measured."""

from bisect import bisect_right
from collections.abc import Sequence
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.sim.costs.measured import MeasuredCosts


class UnsteadyCosts(MeasuredCosts):
    """Measured costs whose step times are drawn at random around the fit.

    1. A step takes the fitted time, times a factor.
    2. The factor is drawn independently for each step from the calibration's ``steadiness``, which was measured for
    steps of one size, with linear interpolation between its entries.
    3. Encodes, the front end and answers take the fitted time: they are long, or hardly affect a gap.

    Args:
        costs: of a file that has ``steadiness``; without it, steps take the fitted time.
        random: generator of the factors.
    """

    def __init__(self, costs: MeasuredCosts, random: Random) -> None:
        super().__init__(costs.calibration, costs.where)
        table: Sequence[tuple[float, float]] = costs.calibration.step.steadiness or ((0.0, 1.0), (1.0, 1.0))
        self._parts = [part for part, _ in table]
        self._factors = [factor for _, factor in table]
        self._random = random

    def step_seconds(
        self, decodes: int, context_tokens: int, prefill_tokens: int, prefill_pairs: float, share: float = 1.0
    ) -> float:
        """Return the seconds of a step of the LLM; 0 if it has no token to compute."""
        steady = super().step_seconds(decodes, context_tokens, prefill_tokens, prefill_pairs, share)
        return steady * self.factor(self._random.random()) if steady else 0.0

    def beside_seconds(self) -> Sequence[float]:
        """Return the extra seconds beside other engines, times a factor drawn once for each step."""
        factor = self.factor(self._random.random())
        return [seconds * factor for seconds in super().beside_seconds()]

    def factor(self, part: float) -> float:
        """Return the factor that this fraction of all steps does not exceed."""
        at = bisect_right(self._parts, part)
        if at == 0:
            return self._factors[0]
        if at == len(self._parts):
            return self._factors[-1]
        low, high = self._parts[at - 1], self._parts[at]
        return self._factors[at - 1] + (self._factors[at] - self._factors[at - 1]) * (part - low) / (high - low)

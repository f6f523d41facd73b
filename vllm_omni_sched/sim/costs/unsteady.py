"""Steps that are as unsteady as they were measured to be."""

from bisect import bisect_right
from collections.abc import Sequence
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.sim.costs.measured import MeasuredCosts


class UnsteadyCosts(MeasuredCosts):
    """Measured costs whose steps are drawn anew around what is fitted.

    1. A step takes what is fitted, times a factor.
    2. The factor is drawn from the calibration's ``steadiness``, of steps of one and the same size: linear between the
       parts that the file has, each step for itself.
    3. Encodes, the front end and answers take what is fitted: they are long, or hardly anybody's gap.

    Args:
        costs: of a file that has ``steadiness``; without one, steps are as fitted.
        random: draws the factors.
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
        """A step of the LLM; 0 if it has no token to compute."""
        steady = super().step_seconds(decodes, context_tokens, prefill_tokens, prefill_pairs, share)
        return steady * self.factor(self._random.random()) if steady else 0.0

    def beside_seconds(self) -> Sequence[float]:
        """Drawn once for each step."""
        factor = self.factor(self._random.random())
        return [seconds * factor for seconds in super().beside_seconds()]

    def factor(self, part: float) -> float:
        """That this part of all steps does not exceed."""
        at = bisect_right(self._parts, part)
        if at == 0:
            return self._factors[0]
        if at == len(self._parts):
            return self._factors[-1]
        low, high = self._parts[at - 1], self._parts[at]
        return self._factors[at - 1] + (self._factors[at] - self._factors[at - 1]) * (part - low) / (high - low)

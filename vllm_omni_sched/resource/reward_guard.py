"""Decide when not to trust a learnt policy."""

from collections import deque
from enum import Enum

from vllm_omni_sched.errors import ConfigError


class TrustReason(str, Enum):
    """State of the guard's trust in the choices."""

    LEARNING = "learning"  # too few rewards to decide: trusted
    GOOD = "good"  # no worse than the expected rewards of the fallback
    RESTING = "resting"  # was worse: the fallback is used
    ON_TRIAL = "on_trial"  # has rested: trusted again, until there are enough rewards to decide


class RewardGuard:
    """Compares the rewards of choices with the expected rewards of the fallback in the same contexts.

    1. Over the last ``window`` rewards, the mean must not be more than ``margin`` below the mean of the expected ones.
       Otherwise the fallback is used for ``rest`` rewards.
    2. Then the choices are on trial: rule 1 applies again after ``window`` rewards of their own.
    3. Each failed trial doubles the rest, up to 16 times; a good one resets it to ``rest``.

    Raises:
        ConfigError: ``window`` is below 2, ``rest`` below 1, or ``margin`` negative.
    """

    _LONGEST = 16

    def __init__(self, window: int = 20, margin: float = 0.15, rest: int = 60) -> None:
        if window < 2 or rest < 1 or not margin >= 0:
            raise ConfigError(
                f"need window of 2 or more, rest of 1 or more, margin of 0 or more, got {window}, {rest}, {margin}"
            )
        self.window, self.margin, self.rest = window, margin, rest
        self.reason = TrustReason.LEARNING
        self._lacks: deque[float] = deque(maxlen=window)  # expected reward of the fallback minus the reward
        self._left = 0
        self._times = 1

    @property
    def trusted(self) -> bool:
        return self.reason is not TrustReason.RESTING

    def observe(self, reward: float, expected: float) -> TrustReason:
        """Record a reward and the expected reward of the fallback, and return the new state."""
        if self.reason is TrustReason.RESTING:
            self._left -= 1
            if self._left <= 0:
                self.reason = TrustReason.ON_TRIAL
            return self.reason
        self._lacks.append(expected - reward)
        if len(self._lacks) < self.window:
            return self.reason
        if sum(self._lacks) > self.margin * self.window:
            if self.reason is not TrustReason.ON_TRIAL:
                self._times = 1
            self._left = self.rest * self._times
            self._times = min(2 * self._times, self._LONGEST)
            self._lacks.clear()
            self.reason = TrustReason.RESTING
        else:
            self.reason = TrustReason.GOOD
        return self.reason

"""Decide when not to trust a forecast."""

from collections import deque
from enum import Enum

from vllm_omni_sched.config.errors import ConfigError


class GuardReason(str, Enum):
    """State of the guard's trust in the model."""

    LEARNING = "learning"  # too few errors to decide: trusted, as chosen by the back-test
    GOOD = "good"  # recently no worse than naive
    BAD = "bad"  # recently worse than naive: the naive forecast is used
    ON_TRIAL = "on_trial"  # was bad, is not good enough yet: the naive forecast is still used


class Guard:
    """Compares the errors of a model with those of the naive forecast, over the last ``window`` values.

    1. The model is distrusted when its mean absolute error is above ``leave`` times the naive one.
    2. It is trusted again below ``come_back`` times, once the whole window is from the time since.

    Raises:
        ConfigError: not ``0 < come_back <= leave``.
    """

    def __init__(self, window: int = 30, leave: float = 1.1, come_back: float = 0.9) -> None:
        if not 0 < come_back <= leave:
            raise ConfigError(f"need 0 < come_back <= leave, got {come_back} and {leave}")
        self.window = window
        self.leave = leave
        self.come_back = come_back
        self.reason = GuardReason.LEARNING
        self._errors: deque[tuple[float, float]] = deque(maxlen=window)
        self._since = 0  # values since the model was distrusted

    @property
    def trusted(self) -> bool:
        return self.reason in (GuardReason.LEARNING, GuardReason.GOOD)

    @property
    def ratio(self) -> float:
        """Return the model's error relative to the naive one; 1 if both are 0."""
        model = sum(one for one, _ in self._errors)
        naive = sum(one for _, one in self._errors)
        return model / naive if naive > 0 else 1.0 if model == 0 else float("inf")

    def observe(self, actual: float, model: float, naive: float) -> GuardReason:
        """Record an actual value and both forecasts of it, and return the new state."""
        self._errors.append((abs(actual - model), abs(actual - naive)))
        self._since += 1
        if len(self._errors) < self.window:
            return self.reason
        ratio = self.ratio
        if self.trusted:
            self.reason = GuardReason.GOOD
            if ratio > self.leave:
                self.reason, self._since = GuardReason.BAD, 0
        elif ratio < self.come_back and self._since >= self.window:
            self.reason = GuardReason.GOOD
        else:
            self.reason = GuardReason.BAD if ratio > self.leave else GuardReason.ON_TRIAL
        return self.reason

    def reset(self) -> None:
        """Start again for a newly chosen model. Distrust stays until the new model has earned trust."""
        self._errors.clear()
        if self.trusted:
            self.reason = GuardReason.LEARNING

"""Limit the requests of a step so that its latency meets a target."""

import math
from abc import ABC, abstractmethod
from enum import Enum

from vllm_omni_sched.config.errors import ConfigError


class LimitReason(str, Enum):
    """Reason for the current limit."""

    START = "start"  # nothing decided yet
    ON_TARGET = "on_target"  # close enough to the target: held
    UNDER_TARGET = "under_target"  # latency below target: raised
    OVER_TARGET = "over_target"  # latency above target: lowered
    NOT_FILLED = "not_filled"  # latency below target, but no step was full: no evidence about a larger limit
    AT_MIN = "at_min"  # over target, cannot go lower
    AT_MAX = "at_max"  # under target, cannot go higher
    MEMORY = "memory"  # too much memory is in use: lowered, whatever the latency


class BatchControl(ABC):
    """A limit on the size of a step, controlled by the latency of past steps.

    ``limit`` always lies in ``[minimum, maximum]``; ``reason`` is the reason for its value.

    Raises:
        ConfigError: the bounds are not ``1 <= minimum <= maximum``.
    """

    def __init__(self, minimum: int, maximum: int) -> None:
        if not 1 <= minimum <= maximum:
            raise ConfigError(f"bounds must be 1 <= minimum <= maximum, got minimum {minimum} and maximum {maximum}")
        self.minimum = minimum
        self.maximum = maximum
        self.limit = minimum
        self.reason = LimitReason.START

    def observe(self, latency_seconds: float, now: float, size: int | None = None) -> None:
        """Record that a step of ``size`` (default: a full one) took ``latency_seconds`` and ended at ``now``.

        Raises:
            ValueError: the latency is negative, or it or the clock is not a finite number; or the size is negative.
        """
        if not (0 <= latency_seconds < math.inf and math.isfinite(now)):
            raise ValueError(f"latency_seconds must be finite and >= 0, at a finite now: {latency_seconds} at {now}")
        if size is not None and size < 0:
            raise ValueError(f"size must be 0 or more, got {size}")
        self._observe(latency_seconds, now, self.limit if size is None else size)

    @abstractmethod
    def _observe(self, latency_seconds: float, now: float, size: int) -> None: ...

    def _set(self, value: int, over: bool) -> None:
        """Set the limit to a wanted value within the bounds, and the reason."""
        self.limit = min(max(value, self.minimum), self.maximum)
        if over:
            self.reason = LimitReason.AT_MIN if value <= self.minimum else LimitReason.OVER_TARGET
        else:
            self.reason = LimitReason.AT_MAX if value >= self.maximum else LimitReason.UNDER_TARGET


class PeriodicControl(BatchControl):
    """Decides once per interval, from the mean latency of its steps.

    1. An interval is at least ``interval_seconds`` long and has at least one step; a gap in the
       observations lengthens it and causes no more than one decision.
    2. A mean within ``tolerance`` (a fraction of the target) of the target changes nothing.
    3. The limit is not raised when no step of the interval was full: such an interval gives no evidence
       about larger steps (as for TCP's congestion window, RFC 7661). It may be lowered.
    """

    def __init__(
        self, target_seconds: float, interval_seconds: float, minimum: int, maximum: int, tolerance: float
    ) -> None:
        super().__init__(minimum, maximum)
        self.target_seconds = target_seconds
        self.interval_seconds = interval_seconds
        self.tolerance = tolerance
        self._began: float | None = None
        self._total_seconds = 0.0
        self._steps = 0
        self._filled = False

    def _observe(self, latency_seconds: float, now: float, size: int) -> None:
        if self._began is None or now < self._began:  # a clock that was set back starts a new interval
            self._began = now
        self._total_seconds += latency_seconds
        self._steps += 1
        self._filled = self._filled or size >= self.limit
        if now - self._began < self.interval_seconds:
            return
        # Below a microsecond only the direction matters, and a logarithm must stay finite.
        mean = max(self._total_seconds / self._steps, 1e-6)
        filled = self._filled
        self._began, self._total_seconds, self._steps, self._filled = now, 0.0, 0, False
        if mean < self.target_seconds and not filled and not self._must_fall():
            self.reason = LimitReason.NOT_FILLED
        else:
            self._decide(mean)

    @abstractmethod
    def _decide(self, mean_seconds: float) -> None: ...

    def _must_fall(self) -> bool:
        """Return whether the limit must fall, whatever the latency of steps."""
        return False

    def _on_target(self, mean_seconds: float) -> bool:
        return abs(mean_seconds / self.target_seconds - 1) <= self.tolerance

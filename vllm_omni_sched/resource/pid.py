"""Control the batch size with a PID controller on its logarithm."""

import math
from dataclasses import dataclass

from vllm_omni_sched.resource.batch_size import LimitReason, PeriodicControl


@dataclass(frozen=True)
class PidGains:
    """Gains per interval, on logarithms: 1 means that half the target latency doubles the limit.

    ``derivative_filter``: the fraction of its old value that the filtered slope keeps in each interval, in [0, 1).
    """

    proportional: float = 0.2
    integral: float = 0.4
    derivative: float = 0.05
    derivative_filter: float = 0.5


class PidBatch(PeriodicControl):
    """A PID controller that holds the mean step latency at a target.

    1. Error and output are logarithms, error = ln(target / latency), output = ln(limit): where
       latency = a + b * size, one per cent more size is at most one per cent more latency, for all a
       and b. So the loop gain is at most that of the gains, and the defaults are stable for every such plant.
    2. The derivative is of the measurement, not of the error, and filtered.
    3. Anti-windup: the integral stays within the bounds of the output, and while the output is clipped
       it only moves towards less clipping (conditional integration; Åström and Hägglund, "PID Controllers", 3.5).
    4. The output changes by at most ``max_factor`` per interval, before rounding.
    5. Within ``tolerance`` of the target, nothing changes.
    6. Memory: while more than ``memory_high`` of it is in use (`note_memory`), the limit does not rise, whatever the
       latency; the error is then at most ln(memory_high / fraction in use), which is negative, so the limit falls.

    Args:
        start: the first limit; default: ``minimum``.
        memory_high: a fraction of the memory, in (0, 1].
    """

    def __init__(
        self,
        target_seconds: float = 0.05,
        interval_seconds: float = 1.0,
        minimum: int = 1,
        maximum: int = 32,
        gains: PidGains | None = None,
        max_factor: float = 2.0,
        tolerance: float = 0.05,
        start: int | None = None,
        memory_high: float = 1.0,
    ) -> None:
        super().__init__(target_seconds, interval_seconds, minimum, maximum, tolerance)
        self.memory_high = memory_high
        self._memory = 0.0
        self.gains = gains or PidGains()
        self.max_factor = max_factor
        self._low, self._high = math.log(minimum), math.log(maximum)
        self.limit = minimum if start is None else min(max(start, minimum), maximum)
        self._integral = self._output = math.log(self.limit)
        self._slope = 0.0
        self._former: float | None = None

    def note_memory(self, used: float) -> None:
        """Set the fraction of the memory, of the device or the host, that is in use now, for rule 6.

        Raises:
            ValueError: it is not a number of 0 or more.
        """
        if not 0 <= used < math.inf:
            raise ValueError(f"used must be finite and >= 0, got {used}")
        self._memory = used

    def _must_fall(self) -> bool:
        return self._memory > self.memory_high

    def _decide(self, mean_seconds: float) -> None:
        gains, measured = self.gains, math.log(mean_seconds)
        slope = 0.0 if self._former is None else measured - self._former
        self._slope = gains.derivative_filter * self._slope + (1 - gains.derivative_filter) * slope
        self._former = measured
        scarce = self._must_fall()
        if self._on_target(mean_seconds) and not scarce:
            self.reason = LimitReason.ON_TARGET
            return
        error, by_memory = math.log(self.target_seconds) - measured, False
        if scarce and (room := math.log(self.memory_high / self._memory)) < error:
            error, by_memory = room, True
        if scarce:
            self._integral = min(self._integral, self._output)
        integral = min(max(self._integral + gains.integral * error, self._low), self._high)
        wanted = integral + gains.proportional * error - gains.derivative * self._slope
        most = math.log(self.max_factor)
        output = min(max(wanted, self._output - most, self._low), self._output + (0.0 if scarce else most), self._high)
        if wanted == output or (wanted - output) * error < 0:
            self._integral = integral
        self._output = output
        self._set(round(math.exp(output)), over=error < 0)
        if by_memory:
            self.reason = LimitReason.MEMORY

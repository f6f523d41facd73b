"""What messages take on a path, learnt from those that were timed."""

from __future__ import annotations

from vllm_omni_sched.resource.rate import Rate

SMALL, LARGE = 16 << 10, 256 << 10
"""Bytes: below, the time is the path's own; above, that of copying or sending."""


class TransferCost:
    """Seconds of a message as a fixed part and one by bytes, for one path and edge."""

    def __init__(self) -> None:
        self._fixed = Rate(0.0)
        self._per_byte = Rate(0.0)

    def observe(self, nbytes: int, seconds: float) -> None:
        """A message of so many bytes took so long."""
        if nbytes <= SMALL:
            self._fixed.observe(1, seconds)
        elif nbytes >= LARGE:
            self._per_byte.observe(nbytes, max(0.0, seconds - self._fixed.per_unit))

    @property
    def bytes_per_second(self) -> float | None:
        """Of long messages; None when none was seen."""
        return 1 / self._per_byte.per_unit if self._per_byte.is_measured and self._per_byte.per_unit > 0 else None

    def seconds(self, nbytes: int) -> float | None:
        """What one would take; None when nothing like it was seen."""
        known = self._fixed.is_measured if nbytes <= SMALL else self._per_byte.is_measured
        return self._fixed.per_unit + self._per_byte.seconds(nbytes) if known else None


class Illness:
    """When a path that refused a message is tried again: later with every refusal, at once after none.

    Args:
        first, longest: seconds until the next trial.
    """

    def __init__(self, first: float = 0.5, longest: float = 30.0) -> None:
        self._first, self._longest = first, longest
        self._wait = 0.0
        self._until = 0.0

    @property
    def well(self) -> bool:
        return not self._wait

    def is_due(self, now: float) -> bool:
        """Whether a sick path should be tried now."""
        return not self.well and now >= self._until

    def refused(self, now: float) -> None:
        """It did not take a message."""
        self._wait = min(self._longest, 2 * self._wait or self._first)
        self._until = now + self._wait

    def took(self) -> None:
        """It took one."""
        self._wait = 0.0

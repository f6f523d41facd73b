"""Costs of messages on a path, learnt from timed ones."""

from __future__ import annotations

from vllm_omni_sched.resource.rate import Rate

SMALL, LARGE = 16 << 10, 256 << 10
"""Sizes in bytes: below the first, the fixed cost dominates; above the second, the cost per byte."""


class TransferCost:
    """The time of a message as a fixed part and a part per byte, in seconds, for one path and edge."""

    def __init__(self) -> None:
        self._fixed = Rate(0.0)
        self._per_byte = Rate(0.0)

    def observe(self, nbytes: int, seconds: float) -> None:
        """Record the time of a message."""
        if nbytes <= SMALL:
            self._fixed.observe(1, seconds)
        elif nbytes >= LARGE:
            self._per_byte.observe(nbytes, max(0.0, seconds - self._fixed.per_unit))

    @property
    def bytes_per_second(self) -> float | None:
        """The throughput of long messages; None without measurements."""
        return 1 / self._per_byte.per_unit if self._per_byte.is_measured and self._per_byte.per_unit > 0 else None

    def seconds(self, nbytes: int) -> float | None:
        """Return the expected time of a message; None without measurements of similar ones."""
        known = self._fixed.is_measured if nbytes <= SMALL else self._per_byte.is_measured
        return self._fixed.per_unit + self._per_byte.seconds(nbytes) if known else None


class Illness:
    """Schedules retries of a path that refused messages: after a wait that doubles with every refusal.

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
        """Return whether a sick path should be tried now."""
        return not self.well and now >= self._until

    def refused(self, now: float) -> None:
        """Record a refused message."""
        self._wait = min(self._longest, 2 * self._wait or self._first)
        self._until = now + self._wait

    def took(self) -> None:
        """Record an accepted message."""
        self._wait = 0.0

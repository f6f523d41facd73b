"""Measure how much memory of this host is in use."""

from __future__ import annotations

CHECK_SECONDS = 1.0  # between two measurements


class HostMemory:
    """Measures the fraction of the host's memory that is in use, at most once per interval.

    An engine reserves its device memory at the start, whatever it runs; data in flight is in host memory.
    """

    def __init__(self) -> None:
        self._next = float("-inf")
        self._used = 0.0

    def used(self, now: float) -> float:
        """Return the fraction in [0, 1]; memory that is available at once, such as the page cache, does not count."""
        if now >= self._next:
            import psutil

            memory = psutil.virtual_memory()
            self._used, self._next = 1 - memory.available / memory.total, now + CHECK_SECONDS
        return self._used

"""How much memory of this host is in use."""

from __future__ import annotations

LOOK_SECONDS = 1.0  # between two looks


class HostMemory:
    """The part of the host's memory that is in use, looked at now and then.

    Of device memory an engine takes its part at the start, whatever it runs; what it has in flight lies on the host.
    """

    def __init__(self) -> None:
        self._next = float("-inf")
        self._used = 0.0

    def used(self, now: float) -> float:
        """In [0, 1]; what can be had at once, such as the page cache, is not in use."""
        if now >= self._next:
            import psutil

            memory = psutil.virtual_memory()
            self._used, self._next = 1 - memory.available / memory.total, now + LOOK_SECONDS
        return self._used

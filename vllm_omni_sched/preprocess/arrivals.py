"""When requests with media begin in the API process, of which many may arrive together. Pure."""

from __future__ import annotations


class MediaTurns:
    """Decides when requests with pictures, audio or video begin, so that the event loop stays prompt.

    1. They begin in the order of their arrival, one at a time.
    2. The next one begins when the last began at least ``pace_seconds`` ago, and the event loop is at most
       ``late_seconds`` late: what has begun leaves it time for others.
    3. One that has waited ``max_wait_seconds`` begins however late the loop is.
    """

    def __init__(self, pace_seconds: float, late_seconds: float, max_wait_seconds: float) -> None:
        self.pace_seconds, self.late_seconds, self.max_wait_seconds = pace_seconds, late_seconds, max_wait_seconds
        self._arrivals: dict[int, float] = {}  # number -> when it arrived, in this order
        self._began = float("-inf")

    def __len__(self) -> int:
        return len(self._arrivals)

    def add(self, number: int, now: float) -> None:
        """Add a request that waits."""
        self._arrivals[number] = now

    def remove(self, number: int) -> None:
        """Remove a request that does not wait any more; without effect if it has begun."""
        self._arrivals.pop(number, None)

    def begin(self, now: float, late_seconds: float) -> int | None:
        """Remove and return the request that begins now, if one does.

        Args:
            late_seconds: how late the event loop is.
        """
        for number, arrival in self._arrivals.items():
            prompt = late_seconds <= self.late_seconds and now - self._began >= self.pace_seconds
            if not prompt and now - arrival < self.max_wait_seconds:
                return None
            del self._arrivals[number]
            self._began = now
            return number
        return None

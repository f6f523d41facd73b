"""The time for which nothing has moved in a stream."""

from __future__ import annotations

import math

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.errors import VideoDeadlineError


class Silence:
    """Limits how long callers that feed a stream, or take its frames, wait without progress.

    Args:
        seconds: longest time without progress while a caller waits.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds, self._clock = seconds, clock
        self._moved = clock()
        self._returned = 0
        self._refused = -math.inf  # when bytes first found no room since the last progress

    def ends(self) -> None:
        """Note progress."""
        self._moved = self._clock()

    def refused(self, returned: int) -> float:
        """Note that bytes find no room, and return the seconds left, as `left` does.

        Repeated calls do not extend the time.

        Args:
            returned: number of slots freed so far: one more counts as progress.
        """
        if returned != self._returned:
            self._returned = returned
            self.ends()
        if self._refused < self._moved:
            self._refused = self._clock()
        return self.left(self._refused)

    @property
    def is_refused(self) -> bool:
        """Return whether bytes have found no room since the last progress."""
        return self._refused >= self._moved

    def left(self, since: float) -> float:
        """Return the seconds left until there must be progress.

        Args:
            since: when the caller began to wait.

        Raises:
            VideoDeadlineError: no time is left.
        """
        left = max(self._moved, since) + self._seconds - self._clock()
        if left <= 0:
            raise VideoDeadlineError(
                f"live video: no bytes or frames have moved for {self._seconds:g} s (silence_seconds): feed or end the "
                "stream, and take frames"
            )
        return left

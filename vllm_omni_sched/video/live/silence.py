"""How long nothing has moved in a stream."""

from __future__ import annotations

import math

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.errors import VideoDeadlineError


class Silence:
    """Ends the waiting of whoever feeds a stream or takes its frames.

    Args:
        seconds: that nothing may move while anybody waits.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds, self._clock = seconds, clock
        self._moved = clock()
        self._returned = 0
        self._refused = -math.inf  # when bytes found no room, the first time since anything moved

    def ends(self) -> None:
        """Something has moved."""
        self._moved = self._clock()

    def refused(self, returned: int) -> float:
        """Bytes find no room; seconds left, as in `left`. Whoever asks again and again waits no longer than who asks
        once.

        Args:
            returned: slots that were ever given back: another one is a move.
        """
        if returned != self._returned:
            self._returned = returned
            self.ends()
        if self._refused < self._moved:
            self._refused = self._clock()
        return self.left(self._refused)

    @property
    def is_refused(self) -> bool:
        """Whether bytes have found no room since anything moved."""
        return self._refused >= self._moved

    def left(self, since: float) -> float:
        """Seconds left for something to move.

        Args:
            since: when waiting began.

        Raises:
            VideoDeadlineError: none.
        """
        left = max(self._moved, since) + self._seconds - self._clock()
        if left <= 0:
            raise VideoDeadlineError(
                f"live video: nothing has moved for {self._seconds:g} s (silence_seconds): feed or end the "
                "stream, and take frames"
            )
        return left

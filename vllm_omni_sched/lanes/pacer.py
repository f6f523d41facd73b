"""A duty cycle: after each slice of work, the lane rests in proportion."""

from collections.abc import Callable

MAX_REST_SECONDS = 1.0


class Pacer:
    """Rests between slices so that work takes ``share()`` of the time.

    Args:
        share: returns the current share, in (0, 1].
        now: monotonic seconds.
        sleep: sleeps for that many seconds.
    """

    def __init__(self, share: Callable[[], float], now: Callable[[], float], sleep: Callable[[float], object]) -> None:
        self._share = share
        self._now = now
        self._sleep = sleep
        self._since = now()

    def begin(self) -> None:
        """Start a job: time until now does not count as work."""
        self._since = self._now()

    def pause(self) -> None:
        """End a slice; the next one begins when this returns."""
        worked = self._now() - self._since
        share = self._share()
        if share < 1.0 and worked > 0.0:
            self._sleep(min(MAX_REST_SECONDS, worked * (1.0 / share - 1.0)))
        self._since = self._now()

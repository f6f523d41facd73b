"""Measure inter-token latency in the scheduler: the time from one step's tokens to the next one's."""


class ItlMeter:
    """An exponentially weighted mean of the intervals between steps that gave tokens to the same requests.

    1. An interval counts if requests decode at both of its ends; idle time is no latency.
    2. Long intervals count at once: the mean moves up by ``rise`` of the difference, down by ``fall``.

    Args:
        rise, fall: in (0, 1].

    Raises:
        ValueError: one of them is outside that range.
    """

    def __init__(self, rise: float = 0.3, fall: float = 0.05) -> None:
        for name, weight in (("rise", rise), ("fall", fall)):
            if not 0 < weight <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {weight}")
        self.rise = rise
        self.fall = fall
        self.seconds: float | None = None
        self._last: float | None = None

    def step(self, now: float, num_decoding: int) -> float | None:
        """Record that a step has put out tokens for so many requests; return the interval if it counts, else None."""
        last, self._last = self._last, now if num_decoding else None
        if last is None or not num_decoding:
            return None
        interval = now - last if now > last else 0.0
        if self.seconds is None:
            self.seconds = interval
        else:
            weight = self.rise if interval > self.seconds else self.fall
            self.seconds += weight * (interval - self.seconds)
        return interval

"""Steps that can be foreseen, computed together."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

MOST = 128  # steps: what is foreseen in vain when somebody comes


class Leap:
    """Decode steps of the same requests, one behind the other, of which nobody has looked at any yet.

    ``ends``: when the first begins, and when each ends. ``seconds``: of each. ``passed``: how many have been looked at.
    """

    __slots__ = ("ends", "passed", "seconds")

    def __init__(self, now: float, seconds: Iterable[float]) -> None:
        self.seconds = list(seconds)
        self.ends = list(accumulate(self.seconds, initial=now))
        self.passed = 0

    def over(self, now: float) -> int:
        """How many have ended before ``now``; the last one never has: its end is an event."""
        return bisect_left(self.ends, now, 1, len(self.ends) - 1) - 1

    @property
    def end(self) -> float:
        """Of the step that runs."""
        return self.ends[self.passed + 1]

"""Skip decode steps that need not be simulated one by one."""


class Leap:
    """Consecutive decode steps of the same requests, each of which reads one token of each more than the one before.

    ``end``, ``seconds``: of the running step, as far as computed. ``left``: steps after it. ``growth``: by how many
    seconds a step is longer than the one before.
    """

    __slots__ = ("end", "growth", "left", "seconds")

    def __init__(self, now: float, seconds: float, growth: float, steps: int) -> None:
        self.end = now + seconds
        self.seconds = seconds
        self.growth = growth
        self.left = steps - 1

    def last_end(self) -> float:
        """Return the end of the last step."""
        left = self.left
        return self.end + left * self.seconds + self.growth * (left * (left + 1) // 2)

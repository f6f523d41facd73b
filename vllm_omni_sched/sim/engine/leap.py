"""Skip decode steps that need not be simulated one by one."""

from vllm_omni_sched.sim.kernel import Simulator

SURE = 1 - 1e-9  # of a time that is a bound: sums of floats are not exact


class Leap:
    """Consecutive decode steps of the same requests.

    ``end``, ``seconds``: of the running step, as far as computed. ``left``: steps after it.
    """

    __slots__ = ("end", "left", "seconds")

    def __init__(self, sim: Simulator, seconds: float, steps: int) -> None:
        self.end = sim.now + seconds
        self.seconds = seconds
        self.left = steps - 1

    def bound(self) -> float:
        """Return a lower bound of the last step's begin: a step takes longer, the more tokens it reads."""
        return self.end + (self.left - 1) * self.seconds * SURE

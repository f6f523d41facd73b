"""Steps that nobody has looked at yet."""

from vllm_omni_sched.sim.kernel import Simulator

SURE = 1 - 1e-9  # of a time that is a bound: sums of floats are not exact


class Leap:
    """Decode steps of the same requests, one behind the other.

    ``end``, ``seconds``: of the step that runs, as far as anybody has looked. ``left``: steps behind it.
    """

    __slots__ = ("end", "left", "seconds")

    def __init__(self, sim: Simulator, seconds: float, steps: int) -> None:
        self.end = sim.now + seconds
        self.seconds = seconds
        self.left = steps - 1

    def bound(self) -> float:
        """No earlier than that begins the last step: the more was read, the longer a step takes."""
        return self.end + (self.left - 1) * self.seconds * SURE

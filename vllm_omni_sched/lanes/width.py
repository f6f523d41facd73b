"""The processors that a process lane uses while the LLM has no use for its own."""

from collections.abc import Callable
from typing import NamedTuple


class Widening(NamedTuple):
    """How the work of a lane uses the processors of all lanes.

    ``use_all``: called in the process that works, with whether to use them from now on; more than once with the same
    answer. ``factor``: number of all processors, divided by that of the lane.
    """

    use_all: Callable[[bool], None]
    factor: float


class Width:
    """Lets a job follow its owner's word on the processors that it may use, slice by slice, and counts its time.

    1. The word is asked for when a job begins, and between its slices.
    2. A second on all processors counts as `Widening.factor` seconds: it does the work of so many on the lane's own.

    Args:
        widening: None for a lane that always uses the same processors.
        wanted: returns whether the owner lets the lane use all processors.
        now: monotonic seconds.
    """

    def __init__(self, widening: Widening | None, wanted: Callable[[], bool], now: Callable[[], float]) -> None:
        self._widening = widening
        self._wanted = wanted
        self._now = now
        self._since = 0.0
        self._wide = False
        self._extra = 0.0

    def begin(self) -> None:
        """Start a job."""
        self._extra = 0.0
        self._wide = False
        self.next_slice()

    def next_slice(self) -> None:
        """End a slice of the job and start the next one."""
        if self._widening is None:
            return
        self._count(self._widening)
        self._wide = self._wanted()
        self._widening.use_all(self._wide)

    def _count(self, widening: Widening) -> None:
        now = self._now()
        if self._wide:
            self._extra += (now - self._since) * (widening.factor - 1)
        self._since = now

    def end(self) -> float:
        """End the job; return the seconds by which rule 2 counts it longer than it was."""
        if self._widening is not None:
            self._count(self._widening)
        return self._extra

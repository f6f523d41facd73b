"""Model one host that all stages of a pipeline share, with their common front end."""

from collections import deque
from typing import Any

from vllm_omni_sched.sim.cores import Cores
from vllm_omni_sched.sim.kernel import Action, Simulator


class Host:
    """A host and its front end.

    1. Steps of engines are threads on the same cores, and slow each other down (`Cores`).
    2. The front end is one thread that handles work in order of arrival. It wakes often
       and works shortly, so it gets a core at once; its cost to engines is part of their measured factors.

    ``front_seconds``: work of the front end so far.
    """

    def __init__(self, sim: Simulator, cores: int) -> None:
        self._sim = sim
        self.cores = Cores(sim, cores)
        self.front_seconds = 0.0
        self._queue: deque[tuple[float, Action, Any]] = deque()
        self._working = False

    def front(self, seconds: float, action: Action, argument: Any) -> None:
        """Queue work of so long for the front end; when it is done, call ``action(argument)``."""
        self._queue.append((seconds, action, argument))
        if not self._working:
            self._next()

    def _next(self) -> None:
        self._working = bool(self._queue)
        if self._working:
            seconds, action, argument = self._queue.popleft()
            self.front_seconds += seconds
            self._sim.after(seconds, self._end, (action, argument))

    def _end(self, what: tuple[Action, Any]) -> None:
        action, argument = what
        action(argument)
        self._next()

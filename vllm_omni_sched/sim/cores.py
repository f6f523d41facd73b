"""Processor cores that several servers share."""

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.sim.kernel import Action, Simulator


class Cores:
    """Egalitarian processor sharing among threads that each can use one core.

    1. n threads get done together what n cores, or all there are, would; or what was measured of n at once.
    2. Each has 1/n of that, all the time.

    Exact, by virtual time, as `servers.shared.SharedServer`: all threads go on at the same speed, so the order of their
    ends never changes.

    Args:
        together: cores' worth of work that one thread, two, … do; more threads do as many as the last says. One
            number: that many cores.

    Raises:
        ConfigError: there is none, or one is 0 or less.
    """

    __slots__ = ("_asked", "_came", "_ends", "_sim", "_since", "_together", "_virtual", "busy_seconds")

    def __init__(self, sim: Simulator, together: Sequence[float]) -> None:
        if not together or min(together) <= 0:
            raise ConfigError(f"cores: what threads do together must be above 0, got {list(together)}")
        self._sim, self._together = sim, tuple(together)
        self._virtual = self._since = 0.0  # seconds that each thread has had; until when
        self._ends: list[tuple[float, int, Action, Any]] = []  # in virtual time
        self._came = self._asked = 0
        self.busy_seconds = 0.0

    def soon(self, seconds: float, action: Action, argument: Any) -> None:
        """Have it happen after so much work of a core, 0 or more; as `Simulator.soon`."""
        self._pass()
        if not self._ends:  # small numbers are more exact
            self._virtual = 0.0
        self._came += 1
        heappush(self._ends, (self._virtual + seconds, self._came, action, argument))
        self._ask()

    @property
    def running(self) -> int:
        """Threads that have something to do."""
        return len(self._ends)

    def _speed(self) -> float:
        threads, together = len(self._ends), self._together
        return min(1.0, together[min(threads, len(together)) - 1] / threads)

    def _pass(self) -> None:
        now = self._sim.now
        if self._ends:
            had = (now - self._since) * self._speed()
            self._virtual += had
            self.busy_seconds += had * len(self._ends)
        self._since = now

    def _ask(self) -> None:
        """For the next end, as it is now; what was asked for before counts no more."""
        self._asked += 1
        if self._ends:
            left = max(self._ends[0][0] - self._virtual, 0.0)
            self._sim.after(left / self._speed(), self._end, self._asked)

    def _end(self, asked: int) -> None:
        if asked != self._asked:
            return
        self._pass()
        end, _, action, argument = heappop(self._ends)
        self._virtual = max(self._virtual, end)  # up to rounding it is that already
        self._ask()
        action(argument)

"""Processor cores that several servers share."""

from heapq import heappop, heappush
from typing import Any

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.sim.kernel import Action, Simulator


class Cores:
    """Egalitarian processor sharing among threads: each of n has a core, or where they are more than cores, its part.

    Exact, by virtual time, as `servers.shared.SharedServer`: all threads go on at the same speed, min(1, cores / n),
    so the order of their ends never changes.

    Args:
        number: of cores.

    Raises:
        ConfigError: ``number`` is below 1.
    """

    __slots__ = ("_asked", "_came", "_ends", "_number", "_sim", "_since", "_virtual", "busy_seconds")

    def __init__(self, sim: Simulator, number: int) -> None:
        if number < 1:
            raise ConfigError(f"cores must be 1 or more, got {number}")
        self._sim, self._number = sim, number
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
        """Threads that want a core now."""
        return len(self._ends)

    def _speed(self) -> float:
        return min(1.0, self._number / len(self._ends))

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

"""Processor cores that several servers share."""

from collections.abc import Sequence
from typing import Any

from vllm_omni_sched.sim.kernel import Action, Simulator

Beside = Sequence[float]
"""Seconds that work takes longer if one other thread is at work all the time, two others, …; more as the last."""


class _Thread:
    __slots__ = ("action", "argument", "beside", "left", "seconds")

    def __init__(self, seconds: float, beside: Beside, action: Action, argument: Any) -> None:
        self.seconds = self.left = seconds
        self.beside, self.action, self.argument = beside, action, argument

    def slower(self, others: int, cores: int) -> float:
        """How many times as long it takes."""
        shared, beside = max((others + 1) / cores, 1.0), self.beside
        if not others or not beside or not self.seconds:
            return shared
        return shared + beside[min(others, len(beside)) - 1] / self.seconds


class Cores:
    """Threads that slow each other down, as it was measured.

    1. A thread that is alone takes as long as it takes; of more threads than cores each has its part.
    2. With others at work all the time it takes so many seconds more, by how many they are; each thread brings these
       along: what wakes often and waits for its turn loses more than what only computes.
    3. With others at work for a part of it, it takes that part of them more: speeds change when a thread begins or
       ends, for all, at once.
    """

    __slots__ = ("_asked", "_number", "_sim", "_since", "_threads")

    def __init__(self, sim: Simulator, number: int) -> None:
        self._sim, self._number = sim, number
        self._threads: list[_Thread] = []
        self._since = 0.0
        self._asked = 0

    def run(self, seconds: float, beside: Beside, action: Action, argument: Any) -> None:
        """Have a thread at work that takes so long alone; then ``action(argument)`` happens."""
        self._pass()
        self._threads.append(_Thread(seconds, beside, action, argument))
        self._ask()

    @property
    def running(self) -> int:
        """Threads that are at work."""
        return len(self._threads)

    def _pass(self) -> None:
        passed, others = self._sim.now - self._since, len(self._threads) - 1
        for thread in self._threads:
            thread.left -= passed / thread.slower(others, self._number)
        self._since = self._sim.now

    def _ask(self) -> None:
        """For the next end, as it is now; what was asked for before counts no more."""
        self._asked += 1
        others, cores = len(self._threads) - 1, self._number
        if self._threads:
            first = min(self._threads, key=lambda thread: thread.left * thread.slower(others, cores))
            seconds = max(first.left * first.slower(others, cores), 0.0)
            self._sim.after(seconds, self._end, (self._asked, first))

    def _end(self, due: tuple[int, _Thread]) -> None:
        asked, thread = due
        if asked != self._asked:
            return
        self._pass()
        self._threads.remove(thread)
        self._ask()
        thread.action(thread.argument)

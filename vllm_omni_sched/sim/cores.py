"""Processor cores that several servers share."""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_omni_sched.sim.kernel import Action, Simulator

Beside = Sequence[float]
"""How many times as long work takes while one other thread is at work, two others, …; more do as much as the last."""


class _Thread:
    __slots__ = ("action", "argument", "beside", "left")

    def __init__(self, left: float, beside: Beside, action: Action, argument: Any) -> None:
        self.left, self.beside, self.action, self.argument = left, beside, action, argument

    def slower(self, others: int) -> float:
        beside = self.beside
        return beside[min(others, len(beside)) - 1] if others and beside else 1.0


class Cores:
    """Threads that slow each other down, as it was measured: processor sharing where each has a weight of its own.

    1. A thread that is alone takes as long as it takes.
    2. While others are at work it goes on more slowly, by a factor that depends on how many they are, and that each
       thread brings along: what wakes often and waits for others loses more than what only computes.
    3. Factors change when a thread begins or ends, for all, at once.
    """

    __slots__ = ("_asked", "_sim", "_since", "_threads")

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._threads: list[_Thread] = []
        self._since = 0.0
        self._asked = 0

    def runs(self, beside: Beside) -> Callable[[float, Action, Any], None]:
        """A way to ask for threads of one kind: seconds that one takes alone, what happens then, and its argument."""

        def soon(seconds: float, action: Action, argument: Any) -> None:
            self._pass()
            self._threads.append(_Thread(seconds, beside, action, argument))
            self._ask()

        return soon

    @property
    def running(self) -> int:
        """Threads that are at work."""
        return len(self._threads)

    def _pass(self) -> None:
        passed, others = self._sim.now - self._since, len(self._threads) - 1
        for thread in self._threads:
            thread.left -= passed / thread.slower(others)
        self._since = self._sim.now

    def _ask(self) -> None:
        """For the next end, as it is now; what was asked for before counts no more."""
        self._asked += 1
        others = len(self._threads) - 1
        if self._threads:
            first = min(self._threads, key=lambda thread: thread.left * thread.slower(others))
            seconds = max(first.left * first.slower(others), 0.0)
            self._sim.after(seconds, self._end, (self._asked, first))

    def _end(self, due: tuple[int, _Thread]) -> None:
        asked, thread = due
        if asked != self._asked:
            return
        self._pass()
        self._threads.remove(thread)
        self._ask()
        thread.action(thread.argument)

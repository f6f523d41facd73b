"""Model one host that all stages of a pipeline share: its processor cores, and the common front end."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from vllm_omni_sched.sim.kernel import Action, Simulator

Beside = Sequence[float]
"""Extra seconds of work if one other thread runs all the time, two others, …; for more, the last value applies."""


class Thread:
    """Work that runs on `Cores`; ``left``: seconds that it still takes alone."""

    __slots__ = ("action", "argument", "beside", "left", "seconds")

    def __init__(self, seconds: float, beside: Beside, action: Action, argument: Any) -> None:
        self.seconds = self.left = seconds
        self.beside, self.action, self.argument = beside, action, argument

    def slower(self, others: int, cores: int) -> float:
        """Return how many times as long the thread takes."""
        shared, beside = max((others + 1) / cores, 1.0), self.beside
        if not others or not beside or not self.seconds:
            return shared
        return shared + beside[min(others, len(beside)) - 1] / self.seconds


class Cores:
    """Threads that slow each other down, by measured factors.

    1. A lone thread takes its own time; if there are more threads than cores, each gets an equal share.
    2. If others run all the time, a thread takes extra seconds that depend on their number; each thread brings its own
       values: a thread that often sleeps and waits for its turn loses more than one that only computes.
    3. If others run for a part of the time, that part of the extra seconds is added: the speeds of all threads change
       whenever a thread begins or ends.
    """

    __slots__ = ("_asked", "_number", "_sim", "_since", "_threads")

    def __init__(self, sim: Simulator, number: int) -> None:
        self._sim, self._number = sim, number
        self._threads: list[Thread] = []
        self._since = 0.0
        self._asked = 0

    def run(self, seconds: float, beside: Beside, action: Action, argument: Any) -> None:
        """Run a thread that takes so long alone; then call ``action(argument)``."""
        self._pass()
        self._threads.append(Thread(seconds, beside, action, argument))
        self._ask()

    @property
    def running(self) -> int:
        """Return the number of running threads."""
        return len(self._threads)

    def _pass(self) -> None:
        passed, others = self._sim.now - self._since, len(self._threads) - 1
        for thread in self._threads:
            thread.left -= passed / thread.slower(others, self._number)
        self._since = self._sim.now

    def _ask(self) -> None:
        """Schedule the next end at the present speeds; an earlier schedule becomes void."""
        self._asked += 1
        others, cores = len(self._threads) - 1, self._number
        if self._threads:
            first = min(self._threads, key=lambda thread: thread.left * thread.slower(others, cores))
            seconds = max(first.left * first.slower(others, cores), 0.0)
            self._sim.after(seconds, self._end, (self._asked, first))

    def _end(self, due: tuple[int, Thread]) -> None:
        asked, thread = due
        if asked != self._asked:
            return
        self._pass()
        self._threads.remove(thread)
        self._ask()
        thread.action(thread.argument)


class Host:
    """Models a host with its front end.

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

"""Run events in the order of their time, and model the host that all stages of a pipeline share."""

import math
import sys
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any], None]


class Simulator:
    """Runs scheduled events on a virtual clock.

    Events of the same time run in the order in which they were scheduled; there is no other rule. An event that
    another one schedules for its own time runs after all that were scheduled before.

    ``now``: seconds since the start. ``events``: number of events so far.
    """

    __slots__ = ("_heap", "_number", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._number = 0

    def at(self, when: float, action: Action, argument: Any = None) -> None:
        """Schedule ``action(argument)`` for that time.

        Raises:
            ValueError: the time is in the past, or not a number.
        """
        if not when >= self.now:
            raise ValueError(f"an event at {when} s cannot be scheduled at {self.now} s")
        self._number += 1
        heappush(self._heap, (when, self._number, action, argument))

    def after(self, seconds: float, action: Action, argument: Any = None) -> None:
        """Schedule an event in so many seconds.

        Raises:
            ValueError: they are negative, or not a number.
        """
        self.at(self.now + seconds, action, argument)

    def soon(self, seconds: float, action: Action, argument: Any) -> None:
        """Schedule like `after`, without the check; ``seconds`` must be 0 or more."""
        self._number = number = self._number + 1
        heappush(self._heap, (self.now + seconds, number, action, argument))

    def run(self, until: float = math.inf, max_events: int | None = None) -> bool:
        """Run all events that are due by then, set ``now`` to that time, and return whether events remain.

        With ``max_events`` it may return earlier, after so many: to show progress, or to be interruptible.
        """
        heap, most = self._heap, sys.maxsize if max_events is None else max_events
        done = 0
        try:
            while heap and done < most:
                when, number, action, argument = heappop(heap)
                if when > until:
                    heappush(heap, (when, number, action, argument))
                    break
                self.now = when
                done += 1
                action(argument)
        finally:
            self.events += done
        if until < math.inf and (not heap or heap[0][0] > until):
            self.now = max(self.now, until)
        return bool(heap)


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

"""Run events in the order of their time."""

import math
import sys
from collections.abc import Callable
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

    def __len__(self) -> int:
        """Return the number of scheduled events."""
        return len(self._heap)

    def clock(self) -> float:
        """Return ``now``, for code that needs a clock function."""
        return self.now

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

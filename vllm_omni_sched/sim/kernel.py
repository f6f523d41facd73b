"""Events in the order of their time."""

import math
import sys
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any], None]


class Simulator:
    """A virtual clock, and what is to happen at which time.

    Events of the same time happen in the order in which they were asked for; there is no other rule. What an event
    asks for at its own time happens after all that was asked for before.

    ``now``: seconds since the start. ``events``: that have happened.
    """

    __slots__ = ("_heap", "_number", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Action, Any]] = []
        self._number = 0

    def __len__(self) -> int:
        """Events to come."""
        return len(self._heap)

    def clock(self) -> float:
        """``now``, for what wants to be given a clock."""
        return self.now

    def at(self, when: float, action: Action, argument: Any = None) -> None:
        """Have ``action(argument)`` happen at that time.

        Raises:
            ValueError: that is in the past, or no time.
        """
        if not when >= self.now:
            raise ValueError(f"an event at {when} s cannot be asked for at {self.now} s")
        self._number += 1
        heappush(self._heap, (when, self._number, action, argument))

    def after(self, seconds: float, action: Action, argument: Any = None) -> None:
        """Have it happen in so many seconds.

        Raises:
            ValueError: they are negative, or no time.
        """
        self.at(self.now + seconds, action, argument)

    def soon(self, seconds: float, action: Action, argument: Any) -> None:
        """`after`, for what is asked for at every step: ``seconds`` are known to be 0 or more."""
        self._number = number = self._number + 1
        heappush(self._heap, (self.now + seconds, number, action, argument))

    def run(self, until: float = math.inf, max_events: int | None = None) -> bool:
        """Let everything happen that is due by then, and ``now`` be then; whether there is more to come.

        With ``max_events`` it may return earlier, after so many: to show progress, or to be interrupted.
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

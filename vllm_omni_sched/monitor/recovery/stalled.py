"""Detect requests that make no progress for any reason, as a last resort."""

from collections import OrderedDict
from collections.abc import Callable

from vllm_omni_sched.config.errors import ConfigError


class StalledRequests:
    """Finds requests that have made no progress for longer than a deadline.

    1. The clock of a request starts when it arrives, and restarts with each sign of progress: a stage puts out anything
       for it, it begins to wait for a stage, or it is sent to a replica. So a request that streams never stalls,
       however long it takes.
    2. A request in our own queue cannot make progress itself. It stalls only when no request at all
       has made any progress for that long: under load, others do.
    3. A request is reported once.

    O(1) for each sign of progress, and for each overdue request.

    Args:
        deadline_seconds: longest time without progress; None: nothing ever stalls.

    Raises:
        ConfigError: the deadline is not above 0.
    """

    def __init__(self, deadline_seconds: float | None) -> None:
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise ConfigError(f"deadline_seconds must be above 0, got {deadline_seconds}")
        self.deadline_seconds = deadline_seconds
        self._last: OrderedDict[str, float] = OrderedDict()  # last sign of progress of each request, oldest first
        self._last_of_any = float("-inf")

    def __len__(self) -> int:
        """Return the number of requests that are watched."""
        return len(self._last)

    def arrived(self, request_id: str, now: float) -> None:
        """Watch a request that has arrived."""
        if self.deadline_seconds is not None:
            self._last[request_id] = self._last_of_any = now
            self._last.move_to_end(request_id)

    def progressed(self, request_id: str, now: float) -> None:
        """Record progress of a request; unknown requests are ignored."""
        if request_id in self._last:
            self.arrived(request_id, now)

    def forget(self, request_id: str) -> None:
        """Forget a request that has left."""
        self._last.pop(request_id, None)

    def overdue(self, now: float, waits: Callable[[str], bool]) -> list[tuple[str, float]]:
        """Return stalled requests with the seconds since their last progress, and stop watching them.

        Args:
            waits: returns whether a request waits in our own queue.
        """
        if self.deadline_seconds is None:
            return []
        since, found = now - self.deadline_seconds, []
        for request_id, last in self._last.items():
            if last > since:
                break
            if self._last_of_any <= since or not waits(request_id):
                found.append((request_id, now - last))
        for request_id, _ in found:
            del self._last[request_id]
        return found

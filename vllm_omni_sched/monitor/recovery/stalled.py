"""The last resort: requests that come no further, for whatever reason."""

from collections import OrderedDict
from collections.abc import Callable

from vllm_omni_sched.errors import ConfigError


class StalledRequests:
    """Finds requests that have made no progress for longer than a deadline.

    1. The clock of a request starts when it arrives, and anew with each sign of progress: a stage puts out anything for
       it, it begins to wait for a stage, or it is sent to a replica. So a request that streams never stalls, however
       long it takes.
    2. A request that waits in our own queue has nothing to make progress with. It stalls only when no request at all
       has made any progress for that long: under load others do.
    3. A request is reported once.

    O(1) for each sign, and for each request that is overdue.

    Args:
        deadline_seconds: None: nothing ever stalls.

    Raises:
        ConfigError: the deadline is not above 0.
    """

    def __init__(self, deadline_seconds: float | None) -> None:
        if deadline_seconds is not None and not deadline_seconds > 0:
            raise ConfigError(f"deadline_seconds must be above 0, got {deadline_seconds}")
        self.deadline_seconds = deadline_seconds
        self._last: OrderedDict[str, float] = OrderedDict()  # sign of progress of each request, the oldest first
        self._last_of_any = float("-inf")

    def __len__(self) -> int:
        """Requests that are watched."""
        return len(self._last)

    def arrived(self, request_id: str, now: float) -> None:
        """A request has come, and is watched from now on."""
        if self.deadline_seconds is not None:
            self._last[request_id] = self._last_of_any = now
            self._last.move_to_end(request_id)

    def progressed(self, request_id: str, now: float) -> None:
        """A request has made progress; nothing if it is not watched."""
        if request_id in self._last:
            self.arrived(request_id, now)

    def forget(self, request_id: str) -> None:
        """The request has left."""
        self._last.pop(request_id, None)

    def overdue(self, now: float, waits: Callable[[str], bool]) -> list[tuple[str, float]]:
        """Requests that stall, with the seconds since their last sign of progress; they are watched no longer.

        Args:
            waits: whether a request waits in our own queue.
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

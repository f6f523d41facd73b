"""Detect requests that make no progress for any reason, as a last resort."""

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

CHECK_SECONDS = 1.0  # between two checks, or a tenth of the deadline if that is less


class RequestView(NamedTuple):
    """A request, as the driver sees it.

    ``waits``: whether it waits in our own queue. ``streaming``: whether the client sends its input piece by piece.
    ``session_owned``: whether it belongs to a session of a client.
    """

    waits: bool
    streaming: bool = False
    session_owned: bool = False


class StalledRequests:
    """Finds requests that have made no progress for longer than a deadline.

    1. The clock of a request starts when it arrives, and restarts with each sign of progress: a stage puts out anything
       for it, it begins to wait for a stage, or it is sent to a replica. So a request that streams never stalls,
       however long it takes.
    2. A request in our own queue cannot make progress itself. It stalls only when no request at all
       has made any progress for that long: under load, others do.
    3. A request is reported once.
    4. Checks are `CHECK_SECONDS` apart, or a tenth of the deadline if that is less.
    5. A session does not stall, because the client sends the next input: its clock restarts instead. A request is one
       if its input streams or if a session owns it.
    6. A companion of classifier-free guidance is not watched; its progress counts for the request that it belongs to.
    7. A request that has left is not reported.

    O(1) for each sign of progress, and for each overdue request.

    Args:
        deadline_seconds: longest time without progress; None: nothing ever stalls.
    """

    def __init__(self, deadline_seconds: float | None) -> None:
        self.deadline_seconds = deadline_seconds
        self._last: OrderedDict[str, float] = OrderedDict()  # last sign of progress of each request, oldest first
        self._last_of_any = self._next = float("-inf")
        self._interval_seconds = min(CHECK_SECONDS, (deadline_seconds or CHECK_SECONDS) / 10)

    def __len__(self) -> int:
        """Return the number of requests that are watched."""
        return len(self._last)

    def arrived(self, request_id: str, now: float) -> None:
        """Watch a request that has arrived."""
        if self.deadline_seconds is not None:
            self._last[request_id] = self._last_of_any = now
            self._last.move_to_end(request_id)

    def progressed(self, request_id: str, now: float, parent: str | None = None) -> None:
        """Record progress of a request; unknown requests are ignored.

        Args:
            parent: the request that this one is a companion of, if any.
        """
        last = self._last
        if request_id in last:  # of each token: `arrived`, written out
            last[request_id] = self._last_of_any = now
            last.move_to_end(request_id)
        if parent is not None and parent in last:
            self.arrived(parent, now)

    def forget(self, request_id: str) -> None:
        """Forget a request that has left."""
        self._last.pop(request_id, None)

    def overdue(self, now: float, view: Callable[[str], RequestView | None]) -> list[tuple[str, float]]:
        """Return stalled requests with the seconds since their last progress, and stop watching them.

        Args:
            view: returns what the driver knows of a request; None if it has left.
        """
        if self.deadline_seconds is None or now < self._next:
            return []
        self._next = now + self._interval_seconds
        since, found = now - self.deadline_seconds, []
        for request_id, last in self._last.items():
            if last > since:
                break
            one = view(request_id)
            if one is None or self._last_of_any <= since or not one.waits:
                found.append((request_id, now - last, one))
        for request_id, _, one in found:
            del self._last[request_id]
            if one is not None and _is_session(one):
                self.arrived(request_id, now)
        return [(request_id, seconds) for request_id, seconds, one in found if one is not None and not _is_session(one)]


def _is_session(view: RequestView) -> bool:
    return view.streaming or view.session_owned

"""The requests for which a thread receives messages, and its sleep while no message is there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from types import TracebackType
from typing import NamedTuple, TypeVar

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.connectors.transport import Arrivals

POLL_AGAIN, POLLED_AGAIN = 0.05, 4
"""Seconds after which an entry is polled although nothing tells that its message is there, and how many in a pass."""
SLEEP = 0.01
"""Seconds that a thread sleeps at most: a message that does not wake it waits no longer."""

Entry = TypeVar("Entry")


class Missed(NamedTuple):
    """A message that was not there, and who tells when it may be."""

    arrivals: Arrivals
    key: str


class _Poll(NamedTuple):
    """The last poll of an entry, which was in vain; ``expected``: its message was said to be there."""

    entry: object  # kept, so that no other object gets its id
    missed: Missed | None
    expected: bool
    at: float


def _at(polled: tuple[float, object]) -> float:
    return polled[0]


class ReceiveQueue(deque[Entry]):
    """Queue of entries that one thread polls in passes; only those are polled whose message may be there.

    The loop of that thread takes as many entries as ``len`` tells from the left, polls each, and appends those that
    must wait; any thread may append new ones. The queue is true while it has entries, even if none is to be polled.

    1. A new entry is polled in the next pass: its message is known only after it was asked for.
    2. An entry whose message was missing is polled again when that message may be there.
    3. An entry whose missing message is not known is polled in each pass.
    4. An entry that was polled `POLL_AGAIN` seconds ago is polled again, because it may have been cancelled: in each
       pass those `POLLED_AGAIN` of them that were polled first, so that they do not hold up messages.
    5. In a pass, entries whose message may be there come first.

    Args:
        missed: returns what the calling thread has just asked for in vain; None if nobody tells when that is there.
    """

    def __init__(
        self, entries: Iterable[Entry], missed: Callable[[], Missed | None], clock: Clock = monotonic_seconds
    ) -> None:
        super().__init__(entries)
        self._missed, self._clock = missed, clock
        self._added = True  # there may be new entries since the last look
        self._pass: deque[tuple[Entry, bool]] = deque()  # still to be polled, and whether by rule 2
        self._polling: tuple[Entry, bool] | None = None
        self._polls: dict[int, _Poll] = {}  # by id of the entry; new entries have none
        self._known: set[Arrivals] = set()  # who tells of the messages that were missing
        self._tickets: dict[Arrivals, Hashable] = {}  # read before the last look
        self._looked = False  # there was a look since the last poll, and nothing to be polled
        self._polled_at = 0.0  # when the entry was polled that is due first by rule 4

    def __bool__(self) -> bool:
        return super().__len__() > 0

    def __len__(self) -> int:
        """Choose the entries of the next pass, and return their number."""
        now, polls, before = self._clock(), self._polls, self._tickets
        tickets = {arrivals: arrivals.ticket() for arrivals in self._known}
        if self._looked and not self._added and tickets == before and now - self._polled_at < POLL_AGAIN:
            return 0
        self._added = False
        absent: dict[Arrivals, list[tuple[Entry, _Poll, str]]] = {}
        there: list[Entry] = []
        others: list[Entry] = []
        still: list[tuple[float, Entry]] = []  # not there, with the time of the last poll
        present = 0
        for entry in list(iter(self)):  # in one step: other threads append
            poll = polls.get(id(entry))
            present += poll is not None
            if poll is None or poll.missed is None:
                others.append(entry)
            elif poll.expected:
                there.append(entry)
            else:
                absent.setdefault(poll.missed.arrivals, []).append((entry, poll, poll.missed.key))
        for arrivals, some in absent.items():
            may = arrivals.may_be_there([key for _, _, key in some], before.get(arrivals))
            for (entry, poll, _), found in zip(some, may, strict=True):
                if found:
                    there.append(entry)
                else:
                    still.append((poll.at, entry))
        still.sort(key=_at)
        others += [entry for at, entry in still[:POLLED_AGAIN] if now - at >= POLL_AGAIN]
        self._pass = deque([(entry, True) for entry in there] + [(entry, False) for entry in others])
        if present < len(polls):  # somebody else has taken entries out
            here = {id(entry) for entry in list(iter(self))}
            self._polls = {key: poll for key, poll in polls.items() if key in here}
        self._tickets, self._known = {one: tickets[one] for one in absent}, set(absent)
        self._looked, self._polled_at = not self._pass, still[0][0] if still else now
        return len(self._pass)

    def append(self, entry: Entry) -> None:
        """Add a new entry, or the one that was just polled in vain."""
        if self._polling is not None and self._polling[0] is entry:
            expected, self._polling = self._polling[1], None
            missed = self._missed()
            self._polls[id(entry)] = _Poll(entry, missed, expected, self._clock())
            if missed is not None:
                self._known.add(missed.arrivals)
            super().append(entry)
            return
        super().append(entry)
        self._added = True

    def popleft(self) -> Entry:
        """Take the next entry of this pass."""
        entry, expected = self._next()
        self._polls.pop(id(entry), None)
        self._polling, self._looked = (entry, expected), False
        return entry

    def sleep(self, seconds: float, pause: Callable[[float], object], on: Callable[[Arrivals | None], object]) -> None:
        """Sleep until an entry may have to be polled.

        Args:
            seconds: the loop's own pause.
            pause: sleeps where nobody tells when messages are there, or a message that was said to be there was not.
            on: told of whose sleep it is, and of its end (None).
        """
        if any(poll.missed is None or poll.expected for poll in self._polls.values()) or len(self._tickets) > 1:
            pause(seconds)
        elif self._looked and not self._added and self._tickets:
            ((arrivals, ticket),) = self._tickets.items()
            on(arrivals)
            try:
                arrivals.wait(ticket, max(seconds, SLEEP))
            finally:
                on(None)

    def _next(self) -> tuple[Entry, bool]:
        while self._pass:
            entry, expected = self._pass.popleft()
            try:
                self.remove(entry)
            except ValueError:  # somebody else has taken it out
                continue
            return entry, expected
        return super().popleft(), False


class ReceiveCondition:
    """Condition on which the loop of a `ReceiveQueue` waits: an arriving message ends the wait, as a notification does.

    Args:
        inner: condition that it stands for; whoever holds either holds both.
    """

    def __init__(self, inner: threading.Condition, queue: ReceiveQueue[Entry]) -> None:
        self._inner, self._queue = inner, queue
        self._sleeps_on: Arrivals | None = None

    def __enter__(self) -> bool:
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a notification or a message; return whether that was told, which `threading.Condition` does, too."""
        if timeout is None or not self._queue:
            return self._inner.wait(timeout)
        self._queue.sleep(timeout, self._inner.wait, self._sleep_on)
        return True

    def notify(self, n: int = 1) -> None:
        self._inner.notify(n)
        self._wake()

    def notify_all(self) -> None:
        self._inner.notify_all()
        self._wake()

    def _sleep_on(self, arrivals: Arrivals | None) -> None:
        if arrivals is not None:
            self._sleeps_on = arrivals
            self._inner.release()
        else:
            self._inner.acquire()
            self._sleeps_on = None

    def _wake(self) -> None:
        if self._sleeps_on is not None:
            self._sleeps_on.wake()
            self._sleeps_on = None

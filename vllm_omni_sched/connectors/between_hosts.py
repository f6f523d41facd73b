"""Brings encodings from a store between hosts into the store of a host, and the other way, on a thread of its own."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.config.errors import ConfigError, RendezvousError, TransportClosedError
from vllm_omni_sched.connectors.encodings import ClaimOutcome, EncodingStore, PutOutcome, SharedStore
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

_POLL_SECONDS = 0.01  # between two looks for encodings that another member makes
_TIDY_SECONDS = 1.0  # between two calls of `tidy`, which also show that the store answers
_RETRY_SECONDS = 2.0  # until a store that did not answer is tried again
_CLOSING_SECONDS = 5.0  # for a call that the thread is in
_MOST_OFFERS = 1024  # encodings that wait to be put


@dataclass(frozen=True)
class SharedItem:
    """The item of an encoding: its modality, and how many embeddings it has."""

    modality: str
    num_embeds: int


class EncodingCheck(Protocol):
    """Decides which bytes from the store between hosts are an encoding of an item for this engine."""

    def can_tell(self, item: SharedItem) -> bool:
        """Return whether an encoding of the item can be checked; if not, none is fetched."""

    def why_refused(self, data: bytes, item: SharedItem) -> str | None:
        """Return what is wrong with an encoding; None if nothing is."""

    def learn(self, data: bytes, item: SharedItem) -> None:
        """Take note of an encoding that this engine has made."""


class Phase(Enum):
    """State of an inquiry."""

    ASKED = "asked"  # the store has not answered yet
    AWAITED = "awaited"  # a member at another host makes one of the encodings
    ENDED = "ended"


@dataclass(eq=False)
class Inquiry:
    """A question about the encodings that a request needs.

    ``items``: by key of the encoding. ``since``: when the phase began. ``fetched``: those that are in the store of the
    host now. ``refused``: those that are none for this engine. ``dropped``: those that nobody needs any more.
    ``answered``: whether the store has answered; if not, the rest is made without claims.
    """

    items: Mapping[str, SharedItem]
    since: float
    phase: Phase = Phase.ASKED
    fetched: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)
    answered: bool = False
    is_over: bool = False


@dataclass
class StoreCounts:
    """What became of encodings in the store between hosts, and how often it was waited for.

    ``unavailable``: encodings that were made here because the store did not answer in time. ``refused``: encodings that
    it had no room for, or that were not put because too many wait. ``malformed``: those in it that are not as this
    engine needs them.
    """

    fetched: int = 0
    put: int = 0
    refused: int = 0
    unavailable: int = 0
    malformed: int = 0
    awaited: int = 0
    gave_up: int = 0


class BetweenHosts:
    """The way between the store of a host and a store that engines of several hosts share.

    1. `ask` returns at once. The thread fetches those of the encodings that are in the store, and claims the others,
       all or none. While another member makes one of them, it looks again.
    2. An inquiry is over when all are fetched or claimed; when the store has not answered for ``answer_seconds``; or
       when another member has made none of them for ``wait_seconds``. The rest is made here then.
    3. A store that raises an error is down: inquiries are over at once until it answers again, and it is tried every
       two seconds. The same holds while the thread waits for an answer for longer than ``answer_seconds``.
    4. `offer` puts an encoding of the store of the host, which ends the claim on it.
    5. What ``check`` refuses counts as missing: it never comes into the store of the host, and is made here.

    Args:
        host: the store of the host.
        connect: returns the store between hosts; called on the thread, and again if it raises `RendezvousError`.
        check: see rule 5; called on the thread.
        answer_seconds: see rule 2.
        wait_seconds: see rule 2.
        clock: seconds.
        threaded: start the thread; without it, each call of `work` does what it would do.
    """

    def __init__(
        self,
        host: EncodingStore,
        connect: Callable[[], SharedStore],
        check: EncodingCheck,
        *,
        answer_seconds: float,
        wait_seconds: float,
        clock: Clock,
        threaded: bool = True,
    ) -> None:
        self._host, self._connect, self._check, self._clock = host, connect, check, clock
        self._answer_seconds, self._wait_seconds = answer_seconds, wait_seconds
        self._store: SharedStore | None = None
        self._inquiries: list[Inquiry] = []
        self._offers: deque[tuple[str, SharedItem | None]] = deque()
        self._releases: deque[str] = deque(maxlen=_MOST_OFFERS)
        self._wake = threading.Condition()
        self._closing = self._has_news = False
        self._was_told = False  # whether the operator knows that the store is down
        self._told_malformed = False  # whether the operator knows of an encoding that was refused
        self._overdue = False  # an inquiry was given up since the thread has last answered one
        self._tidied_at = clock()
        self.is_up = False
        self.counts = StoreCounts()
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._run, name="omni-sched-between-hosts", daemon=True)
            self._thread.start()

    # -- for the scheduler: nothing here waits -----------------------------

    def ask(self, items: Mapping[str, SharedItem]) -> Inquiry:
        """Ask for encodings that this host has claimed, by key."""
        inquiry = Inquiry(items, self._clock())
        with self._wake:
            if self.is_up and not self._overdue and not self._closing:
                self._inquiries.append(inquiry)
                self._tell()
                return inquiry
        inquiry.phase = Phase.ENDED
        return inquiry

    def is_over(self, inquiry: Inquiry) -> bool:
        """Return whether an inquiry is over, by rule 2; what it did not bring is made here."""
        if inquiry.is_over:
            return True
        with self._wake:
            limit = self._wait_seconds if inquiry.phase is Phase.AWAITED else self._answer_seconds
            if inquiry.phase is not Phase.ENDED:
                if self._clock() - inquiry.since < limit:
                    return False
                self._overdue |= inquiry.phase is Phase.ASKED
                inquiry.dropped.update(inquiry.items)
            inquiry.is_over = True
            left = len(inquiry.items) - len(inquiry.fetched)
            if inquiry.phase is Phase.AWAITED:
                self.counts.gave_up += 1
            elif not inquiry.answered:
                self.counts.unavailable += left
        return True

    def drop(self, inquiry: Inquiry | None, key: str) -> None:
        """Record that an encoding is not needed, or will not come; a claim on it ends."""
        with self._wake:
            if inquiry is not None:
                inquiry.dropped.add(key)
            self._releases.append(key)
            self._tell()

    def offer(self, key: str, item: SharedItem | None) -> None:
        """Put an encoding that this engine has made, and that the store of the host has.

        Args:
            key: of the encoding.
            item: None if it is not known.
        """
        with self._wake:
            full = len(self._offers) >= _MOST_OFFERS
            self.counts.refused += full
            if self.is_up and not full:
                self._offers.append((key, item))
            else:
                self._releases.append(key)
            self._tell()

    def close(self) -> None:
        """End the thread, and leave the store."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_CLOSING_SECONDS)
            if thread.is_alive():
                return  # it hangs in a call, and ends with the process
        self._leave()

    def _tell(self) -> None:
        """Wake the thread. The lock is held."""
        self._has_news = True
        self._wake.notify()

    # -- on the thread -----------------------------------------------------

    def work(self) -> float:
        """Do what there is to do; return for how many seconds there is nothing else unless something is asked."""
        try:
            store = self._store
            if store is None:
                store = self._store = self._connect()
                self._comes_up()
            if not self.is_up:
                store.tidy()
                self._comes_up()
            return self._work(store)
        except (RendezvousError, ConfigError, MemoryError) as error:
            self._goes_down(str(error))
        except TransportClosedError:  # the process ends
            self._closing = True
        return _RETRY_SECONDS

    def _work(self, store: SharedStore) -> float:
        while self._releases:
            store.release(self._releases.popleft())
        for inquiry in list(self._inquiries):
            if inquiry.phase is not Phase.ENDED:
                self._advance(store, inquiry)
        with self._wake:
            self._inquiries = [one for one in self._inquiries if one.phase is not Phase.ENDED]
            self._overdue = False
        if self._offers:
            self._put(store, *self._offers.popleft())
            return 0.0
        if self._clock() - self._tidied_at >= _TIDY_SECONDS:
            self._tidied_at = self._clock()
            store.tidy()
        return _POLL_SECONDS if self._inquiries else _TIDY_SECONDS

    def _advance(self, store: SharedStore, inquiry: Inquiry) -> None:
        """Fetch and claim what an inquiry asks for, by rule 1."""
        needed = [key for key in inquiry.items if key not in inquiry.fetched and key not in inquiry.dropped]
        rest = [key for key in needed if not self._fetch(store, inquiry, key)]
        outcome = store.claim(rest) if rest else ClaimOutcome.OURS
        if outcome is ClaimOutcome.OURS:  # others may have put some after the look above, which were not claimed then
            rest = [key for key in rest if not self._fetch(store, inquiry, key)]
        with self._wake:
            if outcome is ClaimOutcome.OTHERS:
                if inquiry.phase is Phase.ASKED:
                    inquiry.phase, inquiry.since = Phase.AWAITED, self._clock()
                    self.counts.awaited += 1
                return
            inquiry.answered, inquiry.phase = True, Phase.ENDED
            unneeded = [key for key in rest if key in inquiry.dropped]
        for key in unneeded:
            store.release(key)

    def _fetch(self, store: SharedStore, inquiry: Inquiry, key: str) -> bool:
        item = inquiry.items[key]
        if key in inquiry.refused or not self._check.can_tell(item):
            return False
        data = store.get(key)
        if data is None:
            return False
        why_refused = self._check.why_refused(data, item)
        if why_refused is not None:
            self._refuse(inquiry, key, why_refused)
            return False
        if self._host.put(key, data) not in (PutOutcome.STORED, PutOutcome.KNOWN):
            return False
        self.counts.fetched += 1
        inquiry.fetched.add(key)
        return True

    def _refuse(self, inquiry: Inquiry, key: str, why: str) -> None:
        inquiry.refused.add(key)
        self.counts.malformed += 1
        if not self._told_malformed:
            logger.warning(
                "Shared encodings: encoding %.80r in the store between hosts is not used, because %s. This engine "
                "encodes the item. Further ones are only counted, by outcome 'malformed' of "
                "shared_store_encodings_total. Check who can reach the store.",
                key,
                why,
            )
        self._told_malformed = True

    def _put(self, store: SharedStore, key: str, item: SharedItem | None) -> None:
        data = self._host.get(key)
        if data is None:  # it was evicted meanwhile
            store.release(key)
            return
        if item is not None:
            self._check.learn(data, item)
        outcome = store.put(key, data)
        self.counts.put += outcome is PutOutcome.STORED
        self.counts.refused += outcome in (PutOutcome.NO_ROOM, PutOutcome.TOO_LARGE)

    def _comes_up(self) -> None:
        if self._was_told:
            logger.warning("Shared encodings: the store between hosts answers again.")
        self._was_told = False
        self.is_up = True

    def _goes_down(self, why: str) -> None:
        """End all inquiries; their encodings are made here."""
        with self._wake:
            self.is_up = False
            for inquiry in self._inquiries:
                inquiry.phase = Phase.ENDED
            self._inquiries.clear()
            self._releases.extend(key for key, _ in self._offers)  # their claims end when the store answers again
            self._offers.clear()
        if not self._was_told:
            logger.warning(
                "Shared encodings: the store between hosts cannot be used, and this engine encodes what its host "
                "lacks, until it answers: %s",
                why,
            )
        self._was_told = True

    def _run(self) -> None:
        while True:
            seconds = self.work()
            with self._wake:
                self._wake.wait_for(lambda: self._closing or (self._has_news and self.is_up), seconds)
                self._has_news = False
                if self._closing:
                    return

    def _leave(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

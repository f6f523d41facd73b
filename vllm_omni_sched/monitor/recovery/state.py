"""Keep the state of each request (its place) and of each replica (its phase) for recovery."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions


@dataclass(slots=True)
class Entry:
    """A request in one place: at ``replica``, waiting for a replica of ``stage``, or between stages (neither)."""

    request_id: str
    stage: int
    whole: str  # common id of the entries of a request that is in several places
    replica: Replica | None = None
    attempt: int = 0  # dispatches so far
    stages: tuple[int, ...] = ()  # to run, the present one first
    held: set[int] = field(default_factory=set)  # finished stages whose output is held
    deaths: int = 0  # in a row
    until: float = math.inf  # while it waits
    wait_reported: bool = False  # whether `Wait` was already returned


class Ledger:
    """All requests that entered and did not leave. Each leaves once: a removed request is not found again."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.waiting: dict[str, Entry] = {}  # longest waiting first
        self.redispatches: Counter[str] = Counter()  # by `Entry.whole`
        self._parts: Counter[str] = Counter()  # entries of each

    def enter(self, request_id: str, stage: int, whole: str) -> Entry:
        if request_id not in self.entries:
            self.entries[request_id] = Entry(request_id, stage, whole)
            self._parts[whole] += 1
        return self.entries[request_id]

    def wait(self, entry: Entry, until: float) -> None:
        entry.replica, entry.until, entry.wait_reported = None, until, False
        self.waiting[entry.request_id] = entry

    def stop_waiting(self, entry: Entry) -> None:
        entry.until = math.inf
        self.waiting.pop(entry.request_id, None)

    def leave(self, request_id: str) -> Entry | None:
        self.waiting.pop(request_id, None)
        entry = self.entries.pop(request_id, None)
        if entry is not None:
            self._parts[entry.whole] -= 1
            if not self._parts[entry.whole]:
                del self._parts[entry.whole], self.redispatches[entry.whole]
        return entry


class Phase(str, Enum):
    """::

    HEALTHY ─► SUSPECT ─► DEAD ─► RESTARTING ─► BACK ─► HEALTHY, with its first answer
       ▲──────────┘        ▲          └─► FAILED ─► RESTARTING, after the back-off
                           └── from every phase; FAILED becomes GIVEN_UP while the circuit is open
    HEALTHY, BACK ─► DRAINING ─► gone, or HEALTHY again
    a replica of another host: AWAITED in place of DEAD; then BACK if that host brings it back, else GIVEN_UP
    """

    HEALTHY = "healthy"
    SUSPECT = "suspect"  # gets no redispatched request
    DEAD = "dead"  # and is not restarted
    RESTARTING = "restarting"
    BACK = "back"
    DRAINING = "draining"  # finishes its requests, and gets no redispatched one
    FAILED = "failed"  # waits for its next attempt
    GIVEN_UP = "given_up"  # too many recent attempts
    AWAITED = "awaited"  # its host may bring it back, or start another one


LIVE = frozenset({Phase.HEALTHY, Phase.BACK})
SERVING = LIVE | {Phase.SUSPECT, Phase.DRAINING}


@dataclass(slots=True)
class ReplicaState:
    """State of a replica in recovery. ``limit``: requests it may hold; ``wake``: when its phase ends by itself."""

    replica: Replica
    limit: float = math.inf
    phase: Phase = Phase.HEALTHY
    wake: float = math.inf
    away: bool = False  # another host starts it
    failures: int = 0  # in a row
    cause: str = ""  # of its last death, or of the last failure to start
    attempts: deque[float] = field(default_factory=deque)
    requests: dict[str, None] = field(default_factory=dict)  # in flight, in order

    def begin_restart(self, now: float, options: RecoveryOptions, rng: Random) -> Phase:
        """Choose the phase after a death or a failed attempt, set its ``wake``, and return it."""
        while self.attempts and self.attempts[0] <= now - options.window_seconds:
            self.attempts.popleft()
        if self.away:
            self.phase, self.wake = Phase.AWAITED, now + options.window_seconds
        elif not options.restart:
            self.phase, self.wake = Phase.DEAD, math.inf
        elif len(self.attempts) >= options.max_restarts:
            self.phase, self.wake = Phase.GIVEN_UP, self.attempts[0] + options.window_seconds
        elif self.failures:
            most = min(options.backoff_seconds * 2 ** min(self.failures - 1, 60), options.max_backoff_seconds)
            self.phase, self.wake = Phase.FAILED, now + most * (1 + rng.random()) / 2
        else:
            self.restart(now)
        return self.phase

    def outage(self, now: float, options: RecoveryOptions) -> str:
        """Return why a replica does not serve and until when, naming the option that says so."""
        died = f"died ({self.cause})" if self.cause else "died"
        match self.phase:
            case Phase.DEAD:
                return f"{died} and is not started again: runtime.recovery.restart is off"
            case Phase.GIVEN_UP if not self.away:
                return (
                    f"{died} after {len(self.attempts)} restarts in the last {now - self.attempts[0]:.0f} s; it is "
                    f"restarted in {self.wake - now:.0f} s, since runtime.recovery.max_restarts allows "
                    f"{options.max_restarts} in {options.window_seconds:g} s (window_seconds); the log shows why"
                )
            case Phase.AWAITED | Phase.GIVEN_UP:
                return f"{died} and was not brought back by its host"
            case _:
                return f"{died} and is being restarted"

    def restart(self, now: float) -> None:
        """Begin an attempt to restart the replica.

        It has no time limit here: whoever restarts has one, and two starts at once would share a device.
        """
        self.attempts.append(now)
        self.phase, self.wake = Phase.RESTARTING, math.inf

"""Keep track of the place of each request."""

import math
from collections import Counter
from dataclasses import dataclass, field

from vllm_omni_sched.monitor.recovery.events import Replica


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
    told: bool = False  # whether `Wait` was already returned


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
        entry.replica, entry.until, entry.told = None, until, False
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

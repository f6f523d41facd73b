"""Scheduler half of shared encodings: which are loaded from the store, which are made here, and which are awaited."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.encodings import ClaimOutcome, EncodingStore
from vllm_omni_sched.monitor.counts import SchedulerMetrics

_PAUSE_SECONDS = 0.002  # until an engine that only waits for other engines looks again
_REPORT_SECONDS = 30.0  # after which workers whose reports do not reach the scheduler have carried out their orders


class SharedRequest(Protocol):
    """The attributes of vLLM's `Request` that are read here."""

    request_id: str
    num_computed_tokens: int
    mm_features: Sequence[Any]


@dataclass
class _Claimed:
    """An encoding that this engine is to make, since when, and the requests that need it, with its place in each."""

    since: float
    needed_by: dict[str, tuple[SharedRequest, int]]
    is_being_made: bool = False

    def was_passed(self, scheduled: Mapping[str, int]) -> bool:
        """Return whether a step has computed tokens of a request behind the start of the item."""
        return any(
            name in scheduled and request.num_computed_tokens + scheduled[name] > start
            for name, (request, start) in self.needed_by.items()
        )


@dataclass
class SharedCounts:
    """Encodings that were loaded or made here, and requests that waited for other engines."""

    loaded: int = 0
    made: int = 0
    awaited: int = 0
    gave_up: int = 0


class SharedPlanner:
    """Decides for the items of requests that are about to run, in the window of one step.

    1. An encoding in the store is loaded, and stays pinned until the workers have read it. It is unpinned at the end of
       the step if the encoder cache had no room for it.
    2. Of the others, a request claims all that its window needs, or none. With the claims it runs, and its items are
       encoded here; the workers put them into the store, which ends the claims.
    3. While another engine makes one of them, the request waits, but for ``wait_seconds`` at most: then it encodes
       without claims.
    4. A claim is released when a step of one of its requests has passed the item without encoding it, because the
       encoder cache of this engine has it, and when all its requests have left.
    5. A claim whose encoding has not come ``wait_seconds`` after it was begun is released.
    6. A step in which requests wait for other engines, and nothing is computed, pauses before it ends.

    Args:
        store: the store of this host.
        window_tokens: largest number of tokens of a step.
        wait_seconds: see rules 3 and 5.
        reports_of_all: whether a report says that all workers have carried out their orders.
        clock: seconds.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        store: EncodingStore,
        window_tokens: int,
        wait_seconds: float,
        *,
        reports_of_all: bool,
        clock: Clock,
        pause: Callable[[float], None],
    ) -> None:
        self._store, self._window_tokens, self._wait_seconds = store, window_tokens, wait_seconds
        self._reports_of_all, self._clock, self._pause = reports_of_all, clock, pause
        self._cached: Collection[str] = ()
        self._claims: dict[str, _Claimed] = {}
        self._waiting: dict[str, float] = {}  # request id -> since when it waits for another engine
        self._hurried: set[str] = set()  # ids of requests that have waited long enough
        self._waits = False  # a request was held back since the last orders
        self._pinned: set[str] = set()
        self._load: dict[str, None] = {}
        self._loading: dict[str, tuple[int, float]] = {}  # pinned -> step of the last order to load it, and its time
        self._step = 0
        self.counts = SharedCounts()

    @property
    def member(self) -> str:
        """Return the token under which encodings are pinned."""
        return self._store.token

    def bind(self, cached: Collection[str]) -> None:
        """Tell this planner what the encoder cache of the engine holds, by mm_hash; without it, nothing is assumed."""
        self._cached = cached

    def may_run(self, request: SharedRequest, num_computed_tokens: int) -> bool:
        """Return whether the request may run: its encodings are in the store, in the encoder cache, or made here."""
        name, needed = request.request_id, dict[str, int]()
        for number in self._window(request.mm_features, num_computed_tokens):
            feature = request.mm_features[number]
            key, start = feature.identifier, feature.mm_position.offset
            claim = self._claims.get(key)
            if claim is not None:
                claim.needed_by.setdefault(name, (request, start))
            elif key not in self._cached and key not in self._pinned and not self._store.has(key):
                needed.setdefault(key, start)
        if name in self._hurried or not needed:
            self._waiting.pop(name, None)
            return True
        now = self._clock()
        if self._store.claim(list(needed)) is ClaimOutcome.OURS:
            self._waiting.pop(name, None)
            for key, start in needed.items():
                if not self._store.has(key):  # else another engine put it after the look above, and it is not claimed
                    self._claims[key] = _Claimed(now, {name: (request, start)})
            return True
        if name not in self._waiting:
            self._waiting[name] = now
            self.counts.awaited += 1
        if now - self._waiting[name] >= self._wait_seconds:
            self._hurried.add(name)
            self.counts.gave_up += 1
            return True
        self._waits = True
        return False

    def _window(self, features: Sequence[Any], num_computed_tokens: int) -> Iterable[int]:
        """Return the indices of the items that a step from this token on may need."""
        if not features or _end(features[-1]) <= num_computed_tokens:
            return ()
        first = bisect_right(features, num_computed_tokens, key=_end)
        last = bisect_left(features, num_computed_tokens + self._window_tokens, lo=first, key=_start)
        return range(first, last)

    def has(self, mm_hash: str) -> bool:
        """Return whether the encoding is in the store; it is pinned then, since vLLM will load what it is told of."""
        if mm_hash not in self._pinned:
            if mm_hash in self._claims or not self._store.pin(mm_hash):
                return False
            self._pinned.add(mm_hash)
        return True

    def allocated(self, mm_hash: str) -> None:
        """Record that the encoder cache has made room for an encoding: it is loaded if it is pinned, else made here."""
        if mm_hash in self._pinned:
            self._load[mm_hash] = None
            self.counts.loaded += 1
            return
        self.counts.made += 1
        claim = self._claims.get(mm_hash)
        if claim is not None:
            claim.is_being_made, claim.since = True, self._clock()

    def take_orders(self, scheduled: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
        """End a step; return the mm_hash of all encodings to load, and the number of the step.

        Args:
            scheduled: request id -> tokens of this step, before they are counted as computed.
        """
        self._step += 1
        now = self._clock()
        load, self._load = tuple(self._load), {}
        self._loading.update(dict.fromkeys(load, (self._step, now)))
        for key in self._pinned - self._loading.keys():
            self._unpin(key)
        for key, claim in list(self._claims.items()):
            late = now - claim.since >= self._wait_seconds
            if late if claim.is_being_made else claim.was_passed(scheduled):
                self._release(key)
        if self._waits and not scheduled:
            self._pause(_PAUSE_SECONDS)
        self._waits = False
        return load, self._step

    def carried_out(self, step: int, offered: Iterable[tuple[str, str]]) -> None:
        """Take a worker's report: it has carried out the orders of this step, and has put or refused encodings."""
        now = self._clock()
        for key, _ in offered:
            self._claims.pop(key, None)  # `put` has ended it
        for key, (ordered, since) in list(self._loading.items()):
            if ordered <= step and (self._reports_of_all or now - since >= _REPORT_SECONDS):
                del self._loading[key]
                if key not in self._load:
                    self._unpin(key)

    def finished(self, request: SharedRequest) -> None:
        """Forget a request; claims that nobody else needs are released, unless their encodings are on the way."""
        name = request.request_id
        self._waiting.pop(name, None)
        self._hurried.discard(name)
        for key, claim in list(self._claims.items()):
            if claim.needed_by.pop(name, None) is not None and not claim.needed_by and not claim.is_being_made:
                self._release(key)

    def count_into(self, metrics: SchedulerMetrics) -> None:
        """Copy this planner's counts into ``metrics``."""
        metrics.shared_host = self.counts.loaded
        metrics.shared_made = self.counts.made
        metrics.shared_awaited = self.counts.awaited
        metrics.shared_gave_up = self.counts.gave_up

    def _release(self, key: str) -> None:
        del self._claims[key]
        self._store.release(key)

    def _unpin(self, key: str) -> None:
        self._pinned.discard(key)
        self._store.unpin(key)

    def close(self) -> None:
        """Leave the store, with all claims and pins."""
        self._store.close()


def _start(feature: Any) -> int:
    return int(feature.mm_position.offset)


def _end(feature: Any) -> int:
    return int(feature.mm_position.offset + feature.mm_position.length)

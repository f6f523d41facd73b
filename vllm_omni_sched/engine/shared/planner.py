"""Scheduler half of shared encodings: which are loaded from the store, which are made here, and which are awaited."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.connectors.encodings import ClaimOutcome, EncodingStore, PutOutcome
from vllm_omni_sched.engine.contents import Contents
from vllm_omni_sched.engine.shared.layouts import HEAD_BYTES, EncodingLayouts
from vllm_omni_sched.engine.shared.messages import SharedOrders, SharedReport
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.counts import SchedulerMetrics
from vllm_omni_sched.resource.engine.reuse import NotReused

logger = get_logger(__name__)

_PAUSE_SECONDS = 0.002  # until an engine that only waits for other engines looks again
_REPORT_SECONDS = 30.0  # after which workers whose reports do not reach the scheduler have carried out their orders


class SharedRequest(Protocol):
    """The attributes of vLLM's `Request` that are read here."""

    request_id: str
    num_computed_tokens: int
    mm_features: Sequence[Any]

    def get_num_encoder_embeds(self, input_id: int) -> int: ...


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
    """Encodings that were loaded or made here, and requests that waited for other engines.

    ``not_reused``: items that were encoded here though the store has, or may have, an encoding of that name or key.
    """

    loaded: int = 0
    made: int = 0
    awaited: int = 0
    gave_up: int = 0
    not_reused: dict[NotReused, int] = field(default_factory=lambda: dict.fromkeys(NotReused, 0))


class SharedPlanner:
    """Decides for the items of requests that are about to run, in the window of one step.

    The key of an encoding in the store is the digest of its item's data (`Contents`). vLLM asks by ``identifier``,
    right after it has asked whether the request may run: the keys are those of that request.

    1. An encoding in the store that fits the item (`EncodingLayouts`) is loaded, and stays pinned until the workers
       have read it. It is unpinned at the end of the step if the encoder cache had no room for it. One that does not
       fit is removed, and the item is encoded here.
    2. Of the others, a request claims all that its window needs, or none. With the claims it runs, and its items are
       encoded here; the workers put them into the store, which ends the claims.
    3. While another engine makes one of them, the request waits, but for ``wait_seconds`` at most: then it encodes
       without claims.
    4. A claim is released when a step of one of its requests has passed the item without encoding it, because the
       encoder cache of this engine has it, and when all its requests have left.
    5. A claim whose encoding has not come ``wait_seconds`` after it was begun is released.
    6. A step in which requests wait for other engines, and nothing is computed, pauses before it ends.
    7. An item without a digest is encoded here, and is not shared.
    8. After `forget`, this engine shares nothing until its workers have reported the store of the weights that they
       have now. It stays a member of the former store until they have carried out their orders about it.

    Args:
        open_store: enters the store of a space.
        space: the first one.
        contents: the digests of items.
        layouts: decides what fits.
        window_tokens: largest number of tokens of a step.
        wait_seconds: see rules 3 and 5.
        reports_of_all: whether a report says that all workers have carried out their orders.
        clock: seconds.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        open_store: Callable[[str], EncodingStore],
        space: str,
        contents: Contents,
        layouts: EncodingLayouts,
        window_tokens: int,
        wait_seconds: float,
        *,
        reports_of_all: bool,
        clock: Clock,
        pause: Callable[[float], None],
    ) -> None:
        self._open, self._contents, self._layouts = open_store, contents, layouts
        self.store: EncodingStore | None = open_store(space)
        self._former: list[tuple[EncodingStore, int, float]] = []  # with the last step that may read it, and its time
        self._window_tokens, self._wait_seconds = window_tokens, wait_seconds
        self._reports_of_all, self._clock, self._pause = reports_of_all, clock, pause
        self._cached: Collection[str] = ()
        self._keys: dict[
            str, tuple[str, str, int]
        ] = {}  # mm_hash -> key, modality, embeddings of the request asked for
        self._claims: dict[str, _Claimed] = {}
        self._waiting: dict[str, float] = {}  # request id -> since when it waits for another engine
        self._hurried: set[str] = set()  # ids of requests that have waited long enough
        self._waits = False  # a request was held back since the last orders
        self._pinned: set[str] = set()
        self._load: dict[str, str] = {}
        self._offer: dict[str, str] = {}
        self._made: dict[str, str] = {}  # key of what is being made -> modality
        self._loading: dict[str, tuple[int, float]] = {}  # pinned -> step of the last order to load it, and its time
        self._step = 0
        self.epoch = 0
        self.counts = SharedCounts()

    def bind(self, cached: Collection[str]) -> None:
        """Tell this planner what the encoder cache of the engine holds, by mm_hash; without it, nothing is assumed."""
        self._cached = cached

    def hash_ahead(self, feature: Any) -> None:
        """Hash the data of an item, on whichever thread, so that no step does it."""
        self._contents.of(feature)

    def may_run(self, request: SharedRequest, num_computed_tokens: int) -> bool:
        """Return whether the request may run: its encodings are in the store, in the encoder cache, or made here."""
        self._keys.clear()
        if self.store is None:
            return True
        name, needed = request.request_id, dict[str, int]()
        for number in self._window(request.mm_features, num_computed_tokens):
            feature = request.mm_features[number]
            if feature.identifier in self._cached or feature.identifier in self._keys:
                continue  # vLLM does not ask for it, whatever its content
            key, start = self._contents.of(feature), feature.mm_position.offset
            if key is None:
                continue
            self._keys[feature.identifier] = key, feature.modality, request.get_num_encoder_embeds(number)
            claim = self._claims.get(key)
            if claim is not None:
                claim.needed_by.setdefault(name, (request, start))
            elif key not in self._pinned and not self.store.has(key):
                needed.setdefault(key, start)
        if name in self._hurried or not needed:
            self._waiting.pop(name, None)
            return True
        now = self._clock()
        if self.store.claim(list(needed)) is ClaimOutcome.OURS:
            self._waiting.pop(name, None)
            for key, start in needed.items():
                if not self.store.has(key):  # else another engine put it after the look above, and it is not claimed
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
        if self.store is None or mm_hash not in self._keys:
            return False
        key, modality, num_embeds = self._keys[mm_hash]
        if key in self._pinned:
            return True
        if key in self._claims or not self.store.pin(key):
            return False
        why_not = self._layouts.why_not(_head(self.store, key), modality, num_embeds)
        if why_not is not None:
            self.counts.not_reused[why_not] += 1
            self.store.unpin(key)
            if why_not is NotReused.OTHER_LAYOUT:
                logger.warning(
                    "encoding %s in %s does not fit item %s: it is removed", key, self.store.directory, mm_hash
                )
                self.store.remove(key)
            del self._keys[mm_hash]
            return False
        self._pinned.add(key)
        return True

    def allocated(self, request: SharedRequest, number: int) -> None:
        """Record that the encoder cache has made room for an encoding: it is loaded if it is pinned, else made here."""
        feature = request.mm_features[number]
        key = None if self.store is None else self._contents.of(feature)
        if key is not None and key in self._pinned:
            self._load[feature.identifier] = key
            self.counts.loaded += 1
            return
        self.counts.made += 1
        if key is None:
            self.counts.not_reused[NotReused.UNKNOWN_CONTENT] += self.store is not None
            return
        self._offer[feature.identifier] = key
        self._made[key] = feature.modality
        claim = self._claims.get(key)
        if claim is not None:
            claim.is_being_made, claim.since = True, self._clock()

    def take_orders(self, scheduled: Mapping[str, int]) -> SharedOrders:
        """End a step; return the orders to the workers.

        Args:
            scheduled: request id -> tokens of this step, before they are counted as computed.
        """
        self._step += 1
        now = self._clock()
        load, self._load = self._load, {}
        offer, self._offer = self._offer, {}
        self._loading.update(dict.fromkeys(load.values(), (self._step, now)))
        for key in self._pinned - self._loading.keys():
            self._unpin(key)
        for key, claim in list(self._claims.items()):
            late = now - claim.since >= self._wait_seconds
            if late if claim.is_being_made else claim.was_passed(scheduled):
                self._release(key)
        if self._waits and not scheduled:
            self._pause(_PAUSE_SECONDS)
        self._waits = False
        return SharedOrders(load, offer, "" if self.store is None else self.store.token, self._step, self.epoch)

    def carried_out(self, report: SharedReport) -> None:
        """Take a worker's report: it has carried out the orders of this step, and has put or refused encodings."""
        now, step = self._clock(), report.step
        for store, last, since in self._former:
            if last <= step and (self._reports_of_all or now - since >= _REPORT_SECONDS):
                store.close()
        self._former = [one for one in self._former if one[0].is_open]
        if report.epoch != self.epoch:
            return
        if report.space and self.store is None:
            self.store = self._open(report.space)
        for key, outcome in report.offered:
            self._claims.pop(key, None)  # `put` has ended it
            modality = self._made.pop(key, None)
            if modality is not None and outcome == PutOutcome.STORED.value and self.store is not None:
                self._learn(self.store, key, modality)
        for key, (ordered, since) in list(self._loading.items()):
            if ordered <= step and (self._reports_of_all or now - since >= _REPORT_SECONDS):
                del self._loading[key]
                if key not in self._load.values():
                    self._unpin(key)

    def _learn(self, store: EncodingStore, key: str, modality: str) -> None:
        """Learn the layout of an encoding that this engine has made, unless it was evicted already."""
        if store.pin(key):
            self._layouts.learn(_head(store, key), modality)
            if key not in self._pinned:
                store.unpin(key)

    def finished(self, request: SharedRequest) -> None:
        """Forget a request; claims that nobody else needs are released, unless their encodings are on the way."""
        name = request.request_id
        self._waiting.pop(name, None)
        self._hurried.discard(name)
        for key, claim in list(self._claims.items()):
            if claim.needed_by.pop(name, None) is not None and not claim.needed_by and not claim.is_being_made:
                self._release(key)

    def forget(self) -> None:
        """Use nothing that was encoded so far: the weights may have changed (rule 8)."""
        if self.store is not None:
            for key in list(self._claims):
                self._release(key)
            self._former.append((self.store, self._step, self._clock()))
        self.store = None
        for state in (self._keys, self._waiting, self._pinned, self._made, self._loading):
            state.clear()
        self.epoch += 1

    def count_into(self, metrics: SchedulerMetrics) -> None:
        """Copy this planner's counts into ``metrics``."""
        metrics.shared_host = self.counts.loaded
        metrics.shared_made = self.counts.made
        metrics.shared_awaited = self.counts.awaited
        metrics.shared_gave_up = self.counts.gave_up
        metrics.shared_not_reused = {reason.value: number for reason, number in self.counts.not_reused.items()}

    def _release(self, key: str) -> None:
        assert self.store is not None
        del self._claims[key]
        self.store.release(key)

    def _unpin(self, key: str) -> None:
        assert self.store is not None
        self._pinned.discard(key)
        self.store.unpin(key)

    def close(self) -> None:
        """Leave the store, with all claims and pins."""
        for store in (self.store, *(one[0] for one in self._former)):
            if store is not None:
                store.close()


def _head(store: EncodingStore, key: str) -> bytes:
    """Return the beginning of an encoding that is pinned; nothing if it cannot be read."""
    try:
        return store.read(key, most=HEAD_BYTES)
    except (KeyError, OSError):
        return b""


def _start(feature: Any) -> int:
    return int(feature.mm_position.offset)


def _end(feature: Any) -> int:
    return int(feature.mm_position.offset + feature.mm_position.length)

"""Count what the scheduler does.

It holds one `SchedulerMetrics` and adds to its plain attributes, which costs an integer addition and takes no lock::

    metrics = SchedulerMetrics()
    metrics.steps += 1
    metrics.windows_narrowed += 1
    metrics.items_visited += last - first
    metrics.sessions = len(sessions)
    metrics.schedule_seconds.observe(seconds)

The name and the meaning of each attribute on ``/metrics`` are in `monitor.metrics`.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from enum import Enum

from vllm_omni_sched.graph.order import DEFAULT_CLASSES, PlaceReason
from vllm_omni_sched.resource.batch_size import LimitReason
from vllm_omni_sched.resource.engine.encode_rounds import RoundReason
from vllm_omni_sched.resource.engine.host_tier import HostReason
from vllm_omni_sched.resource.engine.lane import ShareReason, WhereReason
from vllm_omni_sched.resource.engine.lending import LendingReason
from vllm_omni_sched.resource.engine.reuse import NotReused

SECONDS_BUCKETS = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1.0)
WAIT_BUCKETS = (1e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
REQUEST_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CLASSES = tuple(sla.name for sla in DEFAULT_CLASSES)


class Histogram:
    """Counts of observations per bucket; `bounds` are inclusive and ascending, the last bucket is open."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add one observation, in the unit the metric's name states."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


def _by_class() -> dict[str, int]:
    return dict.fromkeys(CLASSES, 0)


def _waits_by_class() -> dict[str, Histogram]:
    return {name: Histogram(WAIT_BUCKETS) for name in CLASSES}


def _by_reason(reasons: type[Enum]) -> dict[str, int]:
    return {reason.value: 0 for reason in reasons}


@dataclass(slots=True, eq=False)
class SchedulerMetrics:
    """Counters of one scheduler since it started. The engine's thread writes, any thread may read."""

    steps: int = 0
    windows_native: int = 0
    windows_narrowed: int = 0
    items_visited: int = 0
    sessions: int = 0
    session_updates_delta: int = 0
    session_updates_full: int = 0
    spilled_bytes: int = 0
    spilled_items: int = 0
    restored_items: int = 0
    encoder_cache_hits: int = 0
    encoder_cache_misses: int = 0
    encoder_tier_device: int = 0
    encoder_tier_host: int = 0
    encoder_tier_lane: int = 0
    encoder_tier_miss: int = 0
    encoder_evictions: int = 0
    host_tier_bytes: int = 0
    shared_host: int = 0
    shared_made: int = 0
    shared_awaited: int = 0
    shared_gave_up: int = 0
    shared_not_reused: dict[str, int] = field(default_factory=lambda: _by_reason(NotReused))
    kept_not_reused: dict[str, int] = field(default_factory=lambda: _by_reason(NotReused))
    host_offers: dict[str, int] = field(default_factory=lambda: _by_reason(HostReason))
    ahead_encoded: int = 0
    ahead_failed: int = 0
    ahead_pending: int = 0
    ahead_seconds: float = 0.0
    lane_restarts: int = 0
    lane_share: float = 1.0
    kv_lent_blocks: int = 0
    kv_given_back_bytes: int = 0
    bytes_per_embed: float = 0.0
    kv_loans: dict[str, int] = field(default_factory=lambda: _by_reason(LendingReason))
    ahead_wait_seconds: Histogram = field(default_factory=lambda: Histogram(WAIT_BUCKETS))
    decode_rest_seconds: float = 0.0
    placements: dict[str, int] = field(default_factory=lambda: _by_reason(WhereReason))
    share_updates: dict[str, int] = field(default_factory=lambda: _by_reason(ShareReason))
    admitted: dict[str, int] = field(default_factory=lambda: _by_reason(PlaceReason))
    batch_limit: int = 0
    batch_updates: dict[str, int] = field(default_factory=lambda: _by_reason(LimitReason))
    prefill_limit: int = 0
    prefill_updates: dict[str, int] = field(default_factory=lambda: _by_reason(LimitReason))
    encode_rounds: dict[str, int] = field(default_factory=lambda: _by_reason(RoundReason))
    step_requests: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))
    ttft_seconds: dict[str, Histogram] = field(default_factory=_waits_by_class)
    itl_seconds: dict[str, Histogram] = field(default_factory=_waits_by_class)
    slo_met: dict[str, int] = field(default_factory=_by_class)
    slo_missed: dict[str, int] = field(default_factory=_by_class)
    waiting_requests: dict[str, int] = field(default_factory=_by_class)
    schedule_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_BUCKETS))

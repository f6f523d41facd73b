"""The one registry of our metrics: names, meaning, labels; and the object the scheduler counts on.

The scheduler holds one `SchedulerMetrics` and adds to its plain attributes, which costs an integer addition
and takes no lock::

    metrics = SchedulerMetrics()
    metrics.steps += 1
    metrics.windows_narrowed += 1
    metrics.items_visited += last - first
    metrics.sessions = len(sessions)
    metrics.schedule_seconds.observe(seconds)

Names get the prefix ``vllm:omni_sched_`` and base units (seconds, bytes). Every label is a closed set,
written down in `METRICS`; a request id is never one. All metrics are additive: engines that share every label
are summed, gauges too.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from vllm_omni_sched.graph.order import DEFAULT_CLASSES, PlaceReason
from vllm_omni_sched.resource.batch_size import LimitReason
from vllm_omni_sched.resource.encoder_budget import ModalityReason
from vllm_omni_sched.resource.lane_share import ShareReason
from vllm_omni_sched.resource.share import WhereReason

PREFIX = "vllm:omni_sched_"

EACH = "*"

Kind = Literal["counter", "gauge", "histogram"]

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


@dataclass(frozen=True)
class Metric:
    """One metric family.

    `fields` maps each value of `label` ("" without one) to a `SchedulerMetrics` attribute. With `EACH` as the only
    value, the attribute is a dict by label value, all values there from the start.
    """

    name: str
    kind: Kind
    help: str
    fields: Mapping[str, str]
    label: str | None = None

    @property
    def full_name(self) -> str:
        """The name as it reads on /metrics."""
        return PREFIX + self.name


def _by_class() -> dict[str, int]:
    return dict.fromkeys(CLASSES, 0)


def _waits_by_class() -> dict[str, Histogram]:
    return {name: Histogram(WAIT_BUCKETS) for name in CLASSES}


def _by_reason(reasons: type[Enum]) -> dict[str, int]:
    return {reason.value: 0 for reason in reasons}


@dataclass(slots=True, eq=False)
class SchedulerMetrics:
    """What one scheduler has counted since it started. The engine's thread writes, any thread may read."""

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
    encoder_evicted_oldest: int = 0
    encoder_evicted_least_worth: int = 0
    host_tier_bytes: int = 0
    host_restore_is_quicker: int = 0
    host_already_kept: int = 0
    host_encode_is_quicker: int = 0
    host_too_large: int = 0
    host_not_worth_the_room: int = 0
    host_in_use: int = 0
    ahead_encoded: int = 0
    ahead_failed: int = 0
    ahead_pending: int = 0
    ahead_seconds: float = 0.0
    lane_restarts: int = 0
    lane_share: float = 1.0
    ahead_wait_seconds: Histogram = field(default_factory=lambda: Histogram(WAIT_BUCKETS))
    decode_rest_seconds: float = 0.0
    placements: dict[str, int] = field(default_factory=lambda: _by_reason(WhereReason))
    share_updates: dict[str, int] = field(default_factory=lambda: _by_reason(ShareReason))
    admitted: dict[str, int] = field(default_factory=lambda: _by_reason(PlaceReason))
    batch_limit: int = 0
    batch_updates: dict[str, int] = field(default_factory=lambda: _by_reason(LimitReason))
    prefill_limit: int = 0
    prefill_updates: dict[str, int] = field(default_factory=lambda: _by_reason(LimitReason))
    encoder_parts: dict[str, int] = field(default_factory=lambda: _by_reason(ModalityReason))
    step_requests: Histogram = field(default_factory=lambda: Histogram(REQUEST_BUCKETS))
    ttft_seconds: dict[str, Histogram] = field(default_factory=_waits_by_class)
    itl_seconds: dict[str, Histogram] = field(default_factory=_waits_by_class)
    slo_met: dict[str, int] = field(default_factory=_by_class)
    slo_missed: dict[str, int] = field(default_factory=_by_class)
    schedule_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_BUCKETS))


METRICS: tuple[Metric, ...] = (
    Metric("steps_total", "counter", "Engine steps this scheduler has scheduled.", {"": "steps"}),
    Metric(
        "schedule_seconds",
        "histogram",
        "Wall time of one schedule() call.",
        {"": "schedule_seconds"},
    ),
    Metric(
        "windows_total",
        "counter",
        "Windows over the items of a request: left to vLLM where it already searches (native), "
        "or narrowed by our binary search before vLLM saw the list (narrowed).",
        {"native": "windows_native", "narrowed": "windows_narrowed"},
        label="path",
    ),
    Metric(
        "items_visited_total",
        "counter",
        "Items in narrowed windows: per window it follows the tokens of a step, not the size of a session.",
        {"": "items_visited"},
    ),
    Metric("sessions", "gauge", "Streaming-input sessions held by the scheduler now.", {"": "sessions"}),
    Metric(
        "session_updates_total",
        "counter",
        "Messages to the workers about sessions: what is new (delta), or the session whole (full), "
        "as at its start and where a delta would not do.",
        {"delta": "session_updates_delta", "full": "session_updates_full"},
        label="message",
    ),
    Metric(
        "spilled_bytes",
        "gauge",
        "Raw item data moved out of memory now, kept in case a preempted session must encode again.",
        {"": "spilled_bytes"},
    ),
    Metric(
        "spilled_items_total",
        "counter",
        "Items whose raw data was moved out of memory.",
        {"": "spilled_items"},
    ),
    Metric(
        "restored_items_total",
        "counter",
        "Items whose raw data was read back, after a preemption or a rewind.",
        {"": "restored_items"},
    ),
    Metric(
        "encoder_cache_lookups_total",
        "counter",
        "Items looked up in the encoder cache, by what was found.",
        {"hit": "encoder_cache_hits", "miss": "encoder_cache_misses"},
        label="result",
    ),
    Metric(
        "encoder_cache_evictions_total",
        "counter",
        "Encoder outputs evicted to make room for others, by why these.",
        {"oldest": "encoder_evicted_oldest", "least_worth": "encoder_evicted_least_worth"},
        label="reason",
    ),
    Metric(
        "encoder_cache_tier_total",
        "counter",
        "Encoder outputs that requests took, once per request, by where they were: in the encoder cache (device), in "
        "host memory (host), encoded ahead (lane), or nowhere (miss).",
        {
            "device": "encoder_tier_device",
            "host": "encoder_tier_host",
            "lane": "encoder_tier_lane",
            "miss": "encoder_tier_miss",
        },
        label="tier",
    ),
    Metric("encoder_cache_host_bytes", "gauge", "Encoder outputs in host memory now.", {"": "host_tier_bytes"}),
    Metric(
        "encoder_cache_host_offers_total",
        "counter",
        "Evicted encoder outputs offered to host memory: kept because restoring is quicker or kept already, or not "
        "kept, by why.",
        {
            "restore_is_quicker": "host_restore_is_quicker",
            "already_kept": "host_already_kept",
            "encode_is_quicker": "host_encode_is_quicker",
            "too_large": "host_too_large",
            "not_worth_the_room": "host_not_worth_the_room",
            "in_use": "host_in_use",
        },
        label="reason",
    ),
    Metric("encode_ahead_items_total", "counter", "Items encoded ahead of their prefill.", {"": "ahead_encoded"}),
    Metric(
        "encode_ahead_failed_total",
        "counter",
        "Items that could not be encoded ahead; the requests that wanted them have failed.",
        {"": "ahead_failed"},
    ),
    Metric(
        "encode_ahead_pending",
        "gauge",
        "Items that requests wait for, queued or being encoded, now.",
        {"": "ahead_pending"},
    ),
    Metric(
        "encode_ahead_seconds_total",
        "counter",
        "Wall time of encodes in the lane, pauses included.",
        {"": "ahead_seconds"},
    ),
    Metric(
        "encode_lane_share",
        "gauge",
        "Part of the time that the lane may be at work, as steered by inter-token latency.",
        {"": "lane_share"},
    ),
    Metric(
        "encode_lane_restarts_total",
        "counter",
        "Times the encoder process died and another took its place.",
        {"": "lane_restarts"},
    ),
    Metric(
        "encode_ahead_wait_seconds",
        "histogram",
        "Time from the first wish for an encoding to its being ready.",
        {"": "ahead_wait_seconds"},
    ),
    Metric(
        "encode_placements_total",
        "counter",
        "Decisions to encode in the step or in the lane, by reason; option `encode_ahead`.",
        {EACH: "placements"},
        label="reason",
    ),
    Metric(
        "encode_lane_share_updates_total",
        "counter",
        "Updates of the lane's share, by reason.",
        {EACH: "share_updates"},
        label="reason",
    ),
    Metric(
        "decode_rest_seconds_total",
        "counter",
        "Time that steps were held back for the encoder's sake; option `decode_pace`.",
        {"": "decode_rest_seconds"},
    ),
    Metric(
        "admitted_total",
        "counter",
        "Requests taken from the waiting queue, by why they stood first; option `waiting_order`.",
        {EACH: "admitted"},
        label="reason",
    ),
    Metric(
        "batch_limit",
        "gauge",
        "Requests that may run at once, as steered; 0 while option `batch_control` is off.",
        {"": "batch_limit"},
    ),
    Metric(
        "batch_limit_updates_total",
        "counter",
        "Steps after which the batch limit was decided on, by reason.",
        {EACH: "batch_updates"},
        label="reason",
    ),
    Metric(
        "prefill_limit_tokens",
        "gauge",
        "Prompt tokens that a step may compute, as steered; 0 while option `prefill_control` is off.",
        {"": "prefill_limit"},
    ),
    Metric(
        "prefill_limit_updates_total",
        "counter",
        "Steps after which the prefill limit was decided on, by reason.",
        {EACH: "prefill_updates"},
        label="reason",
    ),
    Metric(
        "encoder_budget_parts_total",
        "counter",
        "Parts of a step's encoder budget given to a modality, by reason; option `encoder_split`.",
        {EACH: "encoder_parts"},
        label="reason",
    ),
    Metric("step_requests", "histogram", "Requests in a step; option `slo_metrics`.", {"": "step_requests"}),
    Metric(
        "ttft_seconds",
        "histogram",
        "Time to first token as the scheduler sees it, by class; option `slo_metrics`.",
        {EACH: "ttft_seconds"},
        label="class",
    ),
    Metric(
        "itl_seconds",
        "histogram",
        "Time between tokens as the scheduler sees it, by class; option `slo_metrics`.",
        {EACH: "itl_seconds"},
        label="class",
    ),
    Metric(
        "slo_met_total",
        "counter",
        "Requests that ended with their TTFT and all their gaps within their targets: goodput.",
        {EACH: "slo_met"},
        label="class",
    ),
    Metric(
        "slo_missed_total",
        "counter",
        "Requests that ended otherwise.",
        {EACH: "slo_missed"},
        label="class",
    ),
)

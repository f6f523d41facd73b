"""Registry of our metrics: names, meaning, labels.

Names get the prefix ``vllm:omni_sched_`` and base units (seconds, bytes). Every label is a closed set and never a
request id. All metrics are additive: engines that share every label are summed, gauges too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PREFIX = "vllm:omni_sched_"

EACH = "*"

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One metric family.

    `fields` maps each value of `label` ("" without one) to a `SchedulerMetrics` attribute. With `EACH` as the only
    value, the attribute is a dict by label value, with all values present from the start; if it is empty, the metric
    is not published.
    """

    name: str
    kind: Kind
    help: str
    fields: Mapping[str, str]
    label: str | None = None

    @property
    def full_name(self) -> str:
        """Return the name as it appears on /metrics."""
        return PREFIX + self.name


METRICS: tuple[Metric, ...] = (
    Metric("steps_total", "counter", "Engine steps this scheduler has scheduled.", {"": "steps"}),
    Metric(
        "schedule_seconds",
        "histogram",
        "Wall time of one schedule() call, measured in one of every 16 steps.",
        {"": "schedule_seconds"},
    ),
    Metric(
        "windows_total",
        "counter",
        "Windows over the items of a request: left to vLLM where it already uses binary search (native), "
        "or narrowed by our binary search before vLLM saw the list (narrowed).",
        {"native": "windows_native", "narrowed": "windows_narrowed"},
        label="path",
    ),
    Metric(
        "items_visited_total",
        "counter",
        "Items in narrowed windows; their number depends on the tokens of a step, not on the size of a session.",
        {"": "items_visited"},
    ),
    Metric("sessions", "gauge", "Streaming-input sessions held by the scheduler now.", {"": "sessions"}),
    Metric(
        "session_updates_total",
        "counter",
        "Messages to the workers about sessions: only the changes (delta), or the whole session (full), "
        "as at its start and wherever a delta is not enough.",
        {"delta": "session_updates_delta", "full": "session_updates_full"},
        label="message",
    ),
    Metric(
        "spilled_bytes",
        "gauge",
        "Raw item data now moved out of memory, kept in case a preempted session must be encoded again.",
        {"": "spilled_bytes"},
    ),
    Metric("spilled_items_total", "counter", "Items whose raw data was moved out of memory.", {"": "spilled_items"}),
    Metric(
        "restored_items_total",
        "counter",
        "Items whose raw data was read back, after a preemption or a rewind.",
        {"": "restored_items"},
    ),
    Metric(
        "encoder_cache_lookups_total",
        "counter",
        "Items looked up in the encoder cache, by result.",
        {"hit": "encoder_cache_hits", "miss": "encoder_cache_misses"},
        label="result",
    ),
    Metric(
        "encoder_cache_evictions_total",
        "counter",
        "Encoder outputs evicted to make room for others.",
        {"": "encoder_evictions"},
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
        "kept, by reason.",
        {EACH: "host_offers"},
        label="reason",
    ),
    Metric(
        "shared_encodings_total",
        "counter",
        "Encoder outputs with `encoder_share_bytes` that the encoder cache lacked, by the place where they were: in "
        "the store of the host (host), or nowhere, so that this engine made them (made).",
        {"host": "shared_host", "made": "shared_made"},
        label="place",
    ),
    Metric(
        "shared_encodings_awaited_total",
        "counter",
        "Requests that waited for an encoding that another engine of the host made.",
        {"": "shared_awaited"},
    ),
    Metric(
        "shared_encodings_gave_up_total",
        "counter",
        "Requests that waited in vain for an encoding that another engine of the host made.",
        {"": "shared_gave_up"},
    ),
    Metric(
        "shared_encodings_not_reused_total",
        "counter",
        "Items with `encoder_share_bytes` that this engine encoded without the store of the host: the engine core "
        "cannot read their data to hash it (unknown_content), the encoding that the store has does not fit "
        "(other_layout), or the hidden size of the model is not known before an item was encoded here "
        "(unknown_layout).",
        {EACH: "shared_not_reused"},
        label="reason",
    ),
    Metric(
        "encoder_cache_host_not_reused_total",
        "counter",
        "Items whose encoding was not taken from the lane or from host memory, though one of that name is there, "
        "because it is of another item (other_content), or was not kept, because the engine core cannot read the "
        "item's data to hash it (unknown_content).",
        {EACH: "kept_not_reused"},
        label="reason",
    ),
    Metric("encode_ahead_items_total", "counter", "Items encoded ahead of their prefill.", {"": "ahead_encoded"}),
    Metric(
        "encode_ahead_failed_total",
        "counter",
        "Items that could not be encoded ahead; the requests that needed them failed.",
        {"": "ahead_failed"},
    ),
    Metric(
        "encode_ahead_pending",
        "gauge",
        "Items that requests wait for now, queued or being encoded.",
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
        "Fraction of the time that the lane may work, controlled by inter-token latency.",
        {"": "lane_share"},
    ),
    Metric(
        "encode_lane_restarts_total", "counter", "Restarts of the encoder process after it died.", {"": "lane_restarts"}
    ),
    Metric("kv_lent_blocks", "gauge", "KV blocks lent to encodes; option `kv_lending`.", {"": "kv_lent_blocks"}),
    Metric(
        "kv_loans_total",
        "counter",
        "Decisions on the KV blocks that encodes borrow, one for each step with a loan or an encode, by reason.",
        {EACH: "kv_loans"},
        label="reason",
    ),
    Metric(
        "kv_given_back_bytes_total",
        "counter",
        "Memory of lent KV blocks that was given back to the operating system.",
        {"": "kv_given_back_bytes"},
    ),
    Metric(
        "encode_bytes_per_embed_peak",
        "gauge",
        "The most memory that an encode took for each of its embeddings; with option `kv_lending`.",
        {"": "bytes_per_embed"},
    ),
    Metric(
        "encode_ahead_wait_seconds",
        "histogram",
        "Time from the first request for an encoding until it is ready.",
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
        "Time that steps were delayed to give the encoder its share; option `decode_pace`.",
        {"": "decode_rest_seconds"},
    ),
    Metric(
        "admitted_total",
        "counter",
        "Requests taken from the waiting queue, by the reason for their position; option `waiting_order`.",
        {EACH: "admitted"},
        label="reason",
    ),
    Metric(
        "batch_limit",
        "gauge",
        "Current limit on running requests; 0 while option `batch_control` is off.",
        {"": "batch_limit"},
    ),
    Metric(
        "batch_limit_updates_total",
        "counter",
        "Steps after which the batch limit was decided, by reason.",
        {EACH: "batch_updates"},
        label="reason",
    ),
    Metric(
        "prefill_limit_tokens",
        "gauge",
        "Current limit on the prompt tokens of a step; 0 while option `prefill_control` is off.",
        {"": "prefill_limit"},
    ),
    Metric(
        "prefill_limit_updates_total",
        "counter",
        "Steps after which the prefill limit was decided, by reason.",
        {EACH: "prefill_updates"},
        label="reason",
    ),
    Metric(
        "encode_rounds_total",
        "counter",
        "Decisions to encode an item in the step, to hold it back, or to let a first token wait, by reason; held ones "
        "are counted in each step; option `encode_rounds`.",
        {EACH: "encode_rounds"},
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
        "Requests, and answers of sessions, that met their TTFT and ITL targets for all of their tokens: goodput.",
        {EACH: "slo_met"},
        label="class",
    ),
    Metric(
        "slo_missed_total",
        "counter",
        "Requests, and answers of sessions, that missed their TTFT or an ITL target.",
        {EACH: "slo_missed"},
        label="class",
    ),
    Metric(
        "waiting_requests",
        "gauge",
        "Requests in vLLM's waiting queues now, by class; their sum is `vllm:num_requests_waiting`, so preempted "
        "requests, held ones and sessions between two inputs count, too; absent without option `slo_metrics`.",
        {EACH: "waiting_requests"},
        label="class",
    ),
)

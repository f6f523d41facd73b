"""What `vllm-omni-sched top` shows of a server at one moment, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_omni_sched.monitor.counts import CLASSES
from vllm_omni_sched.monitor.metrics import PREFIX
from vllm_omni_sched.monitor.server_page import ServerPage
from vllm_omni_sched.resource.engine.lane import WhereReason


@dataclass(frozen=True)
class Requests:
    """Requests in the engines now, and those taken from the waiting queue, by the reason for their position.

    ``waiting_by_class``: empty where none are counted by class, which the option `slo_metrics` turns on.
    """

    running: float | None
    waiting: float | None
    waiting_by_reason: dict[str, float]
    waiting_by_class: dict[str, float]
    sessions: float
    kv_cache_usage: float | None
    admitted: dict[str, float]


@dataclass(frozen=True)
class Lanes:
    """The lanes of encode-ahead: items that wait now, the share of the time they may use, and items encoded.

    ``busy``: encodes that ran at a time, on average; None for the time since the start, which is unknown.
    """

    pending: float
    share: float
    items: float
    failed: float
    restarts: float
    busy: float | None
    wait_p50_seconds: float | None
    wait_p99_seconds: float | None


@dataclass(frozen=True)
class EncoderCache:
    """Look-ups of items in the encoder cache, and where requests found their encodings."""

    hits: float
    misses: float
    evicted: float
    tiers: dict[str, float]
    host_bytes: float

    @property
    def hit_rate(self) -> float | None:
        """Return the fraction of look-ups that were hits; None without any."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None


@dataclass(frozen=True)
class Attainment:
    """Requests of a class that met or missed their targets, and the latencies of the class."""

    met: float
    missed: float
    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    itl_p99_seconds: float | None

    @property
    def fraction(self) -> float | None:
        """Return the fraction that met their targets; None without any."""
        ended = self.met + self.missed
        return self.met / ended if ended else None


@dataclass(frozen=True)
class Stage:
    """A replica of a stage of vLLM-Omni."""

    stage: str
    replica: str
    running: float | None
    waiting: float | None
    batch_limit: float | None
    finished: float
    failed: float
    latency_p50_seconds: float | None
    restarts: float


@dataclass(frozen=True)
class Frame:
    """The state of a server. Counts are those of the last ``seconds``, or since its start if that is None.

    ``placements``: decisions where items are encoded, by reason. ``rounds``: those of `encode_rounds`.
    """

    seconds: float | None
    steps: float
    requests: Requests
    lanes: Lanes
    encoder_cache: EncoderCache
    slo: dict[str, Attainment]
    placements: dict[str, float]
    rounds: dict[str, float]
    stages: tuple[Stage, ...]


WHERE = {reason.value: reason.where.value for reason in WhereReason}
"""Place of an encode, by the reason of the decision."""


def frame_of(page: ServerPage, earlier: ServerPage | None = None) -> Frame:
    """Return what a page says; with an earlier one, what happened since then."""
    if earlier is not None and page.restarted_since(earlier):
        earlier = None
    changed = page.since(earlier)
    seconds = None if earlier is None else page.at - earlier.at
    return Frame(
        seconds,
        changed.value(f"{PREFIX}steps_total") or 0.0,
        _requests(changed),
        _lanes(changed, seconds),
        _encoder_cache(changed),
        {name: _attainment(changed, name) for name in CLASSES},
        _counted(changed, "encode_placements_total", "reason"),
        _counted(changed, "encode_rounds_total", "reason"),
        tuple(_stages(changed)),
    )


def _counted(page: ServerPage, name: str, label: str) -> dict[str, float]:
    """Return the counts above 0, by label value, the largest first."""
    found = sorted(page.by(PREFIX + name, label).items(), key=lambda one: -one[1])
    return {value: count for value, count in found if count > 0}


def _requests(page: ServerPage) -> Requests:
    return Requests(
        page.value("vllm:num_requests_running"),
        page.value("vllm:num_requests_waiting"),
        {name: n for name, n in page.by("vllm:num_requests_waiting_by_reason", "reason").items() if n},
        page.by(f"{PREFIX}waiting_requests", "class"),
        page.value(f"{PREFIX}sessions") or 0.0,
        page.mean("vllm:kv_cache_usage_perc"),
        _counted(page, "admitted_total", "reason"),
    )


def _lanes(page: ServerPage, seconds: float | None) -> Lanes:
    def value(name: str) -> float:
        return page.value(PREFIX + name) or 0.0

    wait = f"{PREFIX}encode_ahead_wait_seconds"
    return Lanes(
        value("encode_ahead_pending"),
        page.mean(f"{PREFIX}encode_lane_share") or 0.0,
        value("encode_ahead_items_total"),
        value("encode_ahead_failed_total"),
        value("encode_lane_restarts_total"),
        value("encode_ahead_seconds_total") / seconds if seconds else None,
        page.quantile(wait, 0.5),
        page.quantile(wait, 0.99),
    )


def _encoder_cache(page: ServerPage) -> EncoderCache:
    lookups = page.by(f"{PREFIX}encoder_cache_lookups_total", "result")
    return EncoderCache(
        lookups.get("hit", 0.0),
        lookups.get("miss", 0.0),
        page.value(f"{PREFIX}encoder_cache_evictions_total") or 0.0,
        _counted(page, "encoder_cache_tier_total", "tier"),
        page.value(f"{PREFIX}encoder_cache_host_bytes") or 0.0,
    )


def _attainment(page: ServerPage, name: str) -> Attainment:
    of = {"class": name}
    return Attainment(
        page.value(f"{PREFIX}slo_met_total", **of) or 0.0,
        page.value(f"{PREFIX}slo_missed_total", **of) or 0.0,
        page.quantile(f"{PREFIX}ttft_seconds", 0.5, **of),
        page.quantile(f"{PREFIX}ttft_seconds", 0.99, **of),
        page.quantile(f"{PREFIX}itl_seconds", 0.99, **of),
    )


def _stages(page: ServerPage) -> list[Stage]:
    replicas = {
        (labels["stage"], labels["replica"])
        for name in ("stage_running", "stage_waiting", "stage_requests_total")
        for labels in map(dict, page.samples.get(PREFIX + name, ()))
    }
    found = []
    for stage, replica in sorted(replicas):
        of = {"stage": stage, "replica": replica}
        ended = page.by(f"{PREFIX}stage_requests_total", "outcome", **of)
        found.append(
            Stage(
                stage,
                replica,
                page.value(f"{PREFIX}stage_running", **of),
                page.value(f"{PREFIX}stage_waiting", **of),
                page.value(f"{PREFIX}stage_batch_limit", **of),
                ended.get("finished", 0.0),
                ended.get("failed", 0.0) + ended.get("lost", 0.0),
                page.quantile(f"{PREFIX}stage_latency_seconds", 0.5, **of),
                page.value(f"{PREFIX}stage_restarts_total", **of) or 0.0,
            )
        )
    return found

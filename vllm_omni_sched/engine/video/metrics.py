"""Metrics of video decoding, on ``/metrics`` of the API process that decodes the videos.

vLLM clears all families named ``vllm:`` from its registry when it sets up its own metrics. Therefore ours are in no
registry, but behind one collector without a name. If several API servers share a port, prometheus_client keeps values
in files that its own collector reads, and nothing needs to be registered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vllm_omni_sched.config.errors import VideoDeadlineError, VideoError, VideoInputError, VideoLimitError
from vllm_omni_sched.monitor.metrics import PREFIX, Kind
from vllm_omni_sched.video.results import STAGES, Report

OUTCOMES = ("decoded", "bad_input", "limit", "deadline", "no_decoder")
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class VideoMetric:
    """A metric family. Series for ``values`` of its label exist from the start, others appear as they occur."""

    name: str
    kind: Kind
    help: str
    label: str | None = None
    values: tuple[str, ...] = ()


VIDEO_METRICS = (
    VideoMetric(
        "video_stage_seconds",
        "histogram",
        "Time of a video in a stage: indexing its packets, waiting for decoders, decoding and converting (both summed "
        "over decoders), assembling the array.",
        "stage",
        STAGES,
    ),
    VideoMetric("video_decoders_busy", "gauge", "Decoder processes that are decoding now."),
    VideoMetric("video_decoders", "gauge", "Decoder processes that are running."),
    VideoMetric(
        "video_frames_total",
        "counter",
        "Frames that decoders produced (decoded), requested frames among them (used), and requested frames that could "
        "not be decoded soundly (missing).",
        "frames",
        ("decoded", "used", "missing"),
    ),
    VideoMetric(
        "video_copied_bytes_total",
        "counter",
        "Bytes of videos and frames that were copied, beyond the single write of each.",
    ),
    VideoMetric(
        "videos_total",
        "counter",
        "Videos by outcome: decoded, or the kind of error.",
        "outcome",
        OUTCOMES,
    ),
    VideoMetric(
        "video_fallbacks_total",
        "counter",
        "Videos decoded in a slower way, by reason.",
        "reason",
    ),
    VideoMetric("video_worker_restarts_total", "counter", "Decoder processes that died and were replaced."),
    VideoMetric(
        "video_service_restarts_total",
        "counter",
        "Restarts of the whole decoding service after it had ended by itself; any such restart is a bug.",
    ),
)


class VideoMetrics(Collector):
    """Counts the events that the decoding service reports (`vllm_omni_sched.video.results.Observer`)."""

    def __init__(self) -> None:
        self._metrics = {metric.name: _make(metric) for metric in VIDEO_METRICS}

    def attach(self) -> None:
        """Add these metrics to ``/metrics`` of this process."""
        REGISTRY.register(self)

    def collect(self) -> Iterable[Family]:
        """Return all families of this process."""
        return [family for metric in self._metrics.values() for family in metric.collect()]

    def describe(self) -> Iterable[Family]:
        """Return the families for their names."""
        return self.collect()

    def busy(self, decoders: int, of: int) -> None:
        """Set the number of decoders that work now, and of all that run."""
        self._metrics["video_decoders_busy"].set(decoders)
        self._metrics["video_decoders"].set(of)

    def loaded(self, report: Report) -> None:
        """Count a video that was decoded."""
        for stage, seconds in report.seconds.items():
            self._metrics["video_stage_seconds"].labels(stage).observe(seconds)
        self._metrics["video_frames_total"].labels("decoded").inc(report.decoded)
        self._metrics["video_frames_total"].labels("used").inc(report.used)
        self._metrics["video_copied_bytes_total"].inc(report.copied_bytes)
        for reason in report.fallbacks:
            self.fell_back(reason)
        self._metrics["videos_total"].labels("decoded").inc()

    def failed(self, error: VideoError) -> None:
        """Count a video that could not be decoded."""
        self._metrics["videos_total"].labels(_outcome(error)).inc()

    def restarted(self, kind: str) -> None:
        """Count a decoder process that died and was replaced."""
        self._metrics["video_worker_restarts_total"].inc()

    def renewed(self) -> None:
        """Count a restart of the whole decoding service."""
        self._metrics["video_service_restarts_total"].inc()

    def missed(self, frames: int) -> None:
        """Count requested frames of a video that could not be decoded soundly."""
        self._metrics["video_frames_total"].labels("missing").inc(frames)

    def fell_back(self, reason: str) -> None:
        """Count a video that was decoded in a slower way."""
        self._metrics["video_fallbacks_total"].labels(reason).inc()


def _outcome(error: VideoError) -> str:
    for kind, outcome in (
        (VideoLimitError, "limit"),
        (VideoInputError, "bad_input"),
        (VideoDeadlineError, "deadline"),
    ):
        if isinstance(error, kind):
            return outcome
    return "no_decoder"


def _make(metric: VideoMetric) -> Any:
    names = (metric.label,) if metric.label else ()
    name = PREFIX + metric.name
    made: Any
    if metric.kind == "histogram":
        made = Histogram(name, metric.help, names, buckets=_BUCKETS, registry=None)
    elif metric.kind == "gauge":
        made = Gauge(name, metric.help, names, registry=None, multiprocess_mode="livesum")
    else:
        made = Counter(name, metric.help, names, registry=None)
    for value in metric.values:
        made.labels(value)
    return made

"""Metrics of video decoding, on ``/metrics`` of the API process in which videos are decoded.

vLLM clears its registry of everything called ``vllm:`` when it sets up its own metrics: ours are in no registry, but
behind one collector without a name. Where several API servers share a port, prometheus_client keeps values in files
that its own collector reads, and nothing is to be registered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vllm_omni_sched.errors import VideoDeadlineError, VideoError, VideoInputError, VideoLimitError
from vllm_omni_sched.monitor.metrics import PREFIX, Kind
from vllm_omni_sched.video.base import Report

STAGES = ("index", "wait", "decode", "convert", "assemble")
OUTCOMES = ("decoded", "bad_input", "limit", "deadline", "no_decoder")
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True)
class VideoMetric:
    """One metric family; ``values`` of its label are there from the start, others come as they occur."""

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
    VideoMetric("video_decoders_busy", "gauge", "Decoder processes at work now."),
    VideoMetric("video_decoders", "gauge", "Decoder processes there are."),
    VideoMetric(
        "video_frames_total",
        "counter",
        "Frames that came out of decoders (decoded), those of them that were wanted (used), and wanted frames that are "
        "not sound (missing).",
        "frames",
        ("decoded", "used", "missing"),
    ),
    VideoMetric(
        "video_copied_bytes_total",
        "counter",
        "Bytes of videos and frames that were copied, beyond the one write of each.",
    ),
    VideoMetric(
        "videos_total",
        "counter",
        "Videos by what became of them: frames (decoded), or an error, by its kind.",
        "outcome",
        OUTCOMES,
    ),
    VideoMetric(
        "video_fallbacks_total",
        "counter",
        "Times that a video was decoded in a slower way, by reason.",
        "reason",
    ),
    VideoMetric("video_worker_restarts_total", "counter", "Decoder processes that died and were replaced."),
    VideoMetric(
        "video_service_restarts_total",
        "counter",
        "Times that all of decoding had ended by itself and was started anew; more than none is an error of ours.",
    ),
)


class VideoMetrics(Collector):
    """Counts what the decoders' service reports (`vllm_omni_sched.video.observe.Observer`)."""

    def __init__(self) -> None:
        self._metrics = {metric.name: _make(metric) for metric in VIDEO_METRICS}

    def attach(self) -> None:
        """Let ``/metrics`` of this process serve them."""
        REGISTRY.register(self)

    def collect(self) -> Iterable[Family]:
        """All families of this process."""
        return [family for metric in self._metrics.values() for family in metric.collect()]

    def describe(self) -> Iterable[Family]:
        """The same, as far as names go."""
        return self.collect()

    def busy(self, decoders: int, of: int) -> None:
        """So many decoders work now, of all that run."""
        self._metrics["video_decoders_busy"].set(decoders)
        self._metrics["video_decoders"].set(of)

    def loaded(self, report: Report) -> None:
        """A video has become frames."""
        for stage, seconds in report.seconds.items():
            self._metrics["video_stage_seconds"].labels(stage).observe(seconds)
        self._metrics["video_frames_total"].labels("decoded").inc(report.decoded)
        self._metrics["video_frames_total"].labels("used").inc(report.used)
        self._metrics["video_copied_bytes_total"].inc(report.copied_bytes)
        for reason in report.fallbacks:
            self.fell_back(reason)
        self._metrics["videos_total"].labels("decoded").inc()

    def failed(self, error: VideoError) -> None:
        """A video has not."""
        self._metrics["videos_total"].labels(_outcome(error)).inc()

    def restarted(self, kind: str) -> None:
        """A decoder process has died and another one runs in its place."""
        self._metrics["video_worker_restarts_total"].inc()

    def renewed(self) -> None:
        """All of decoding had ended, and begins anew."""
        self._metrics["video_service_restarts_total"].inc()

    def missed(self, frames: int) -> None:
        """So many frames of a video were wanted and are not sound."""
        self._metrics["video_frames_total"].labels("missing").inc(frames)

    def fell_back(self, reason: str) -> None:
        """A video was decoded in a slower way."""
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

"""Metrics of video decoding, on ``/metrics`` of the API process that decodes the videos."""

from __future__ import annotations

from vllm_omni_sched.config.errors import VideoDeadlineError, VideoError, VideoInputError, VideoLimitError
from vllm_omni_sched.engine.metrics.front_end import FrontEndMetric, FrontEndMetrics
from vllm_omni_sched.video.results import STAGES, Observer, Report

OUTCOMES = ("decoded", "bad_input", "limit", "deadline", "no_decoder")


VIDEO_METRICS = (
    FrontEndMetric(
        "video_stage_seconds",
        "histogram",
        "Time of a video in a stage: indexing its packets, waiting for decoders, decoding and converting (both summed "
        "over decoders), assembling the array.",
        "stage",
        STAGES,
    ),
    FrontEndMetric("video_decoders_busy", "gauge", "Decoder processes that are decoding now."),
    FrontEndMetric("video_decoders", "gauge", "Decoder processes that are running."),
    FrontEndMetric(
        "video_frames_total",
        "counter",
        "Frames that decoders produced (decoded), requested frames among them (used), and requested frames that could "
        "not be decoded soundly (missing).",
        "frames",
        ("decoded", "used", "missing"),
    ),
    FrontEndMetric(
        "video_copied_bytes_total",
        "counter",
        "Bytes of videos and frames that were copied, beyond the single write of each.",
    ),
    FrontEndMetric("videos_total", "counter", "Videos by outcome: decoded, or the kind of error.", "outcome", OUTCOMES),
    FrontEndMetric("video_fallbacks_total", "counter", "Videos decoded in a slower way, by reason.", "reason"),
    FrontEndMetric("video_worker_restarts_total", "counter", "Decoder processes that died and were replaced."),
    FrontEndMetric(
        "video_service_restarts_total",
        "counter",
        "Restarts of the whole decoding service after it had ended by itself; any such restart is a bug.",
    ),
)


class VideoMetrics(FrontEndMetrics, Observer):
    """Counts the events that the decoding service reports (`vllm_omni_sched.video.results.Observer`)."""

    def __init__(self) -> None:
        super().__init__(VIDEO_METRICS)

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
    for kind, outcome in ((VideoLimitError, "limit"), (VideoInputError, "bad_input"), (VideoDeadlineError, "deadline")):
        if isinstance(error, kind):
            return outcome
    return "no_decoder"

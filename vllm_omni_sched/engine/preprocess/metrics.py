"""Metrics of the preprocessing pool, on ``/metrics`` of the API process that owns it."""

from __future__ import annotations

from enum import Enum

from vllm_omni_sched.engine.metrics.front_end import FrontEndMetric, FrontEndMetrics
from vllm_omni_sched.preprocess.order import Outcome


class Fallback(str, Enum):
    """Reason for which vLLM's own code prepared items in the API process."""

    EMBEDDINGS = "embeddings"  # they need no preprocessing
    UNSUPPORTED = "unsupported"  # a value in them, or in the result, is not sent between processes
    FORMAT = "format"  # pictures of this format are decoded when they are received
    LOADED = "loaded"  # code of the API process has asked for the pixels of a picture


PREPROCESS_METRICS = (
    FrontEndMetric(
        "preprocess_jobs_total",
        "counter",
        "Jobs of the preprocessing pool by outcome. A job holds the items of one request that no cache has.",
        "outcome",
        tuple(one.value for one in Outcome),
    ),
    FrontEndMetric("preprocess_wait_seconds", "histogram", "Time of a job from its arrival to its start in a process."),
    FrontEndMetric("preprocess_seconds", "histogram", "Time of a job in its process."),
    FrontEndMetric("preprocess_processes_busy", "gauge", "Preprocessing processes that work now."),
    FrontEndMetric("preprocess_jobs_waiting", "gauge", "Jobs that wait for a process, or for memory."),
    FrontEndMetric("preprocess_held_bytes", "gauge", "Results that the API process has not taken yet."),
    FrontEndMetric(
        "preprocess_process_restarts_total", "counter", "Preprocessing processes that ended and were replaced."
    ),
    FrontEndMetric(
        "preprocess_fallbacks_total",
        "counter",
        "Requests, or pictures, that vLLM's own code prepared in the API process, by reason.",
        "reason",
        tuple(one.value for one in Fallback),
    ),
)


class PreprocessMetrics(FrontEndMetrics):
    """Counts the events that the pool reports (`vllm_omni_sched.preprocess.pool.Observer`), and fallbacks."""

    def __init__(self) -> None:
        super().__init__(PREPROCESS_METRICS)

    def started(self, waited_seconds: float) -> None:
        """Count the wait of a job that starts."""
        self._metrics["preprocess_wait_seconds"].observe(waited_seconds)

    def ended(self, outcome: Outcome, seconds: float) -> None:
        """Count a job that has ended."""
        self._metrics["preprocess_jobs_total"].labels(outcome.value).inc()
        if outcome is Outcome.DONE:
            self._metrics["preprocess_seconds"].observe(seconds)

    def state(self, busy: int, waiting: int, held_bytes: int) -> None:
        """Set how many processes work, how many jobs wait, and how large the results are."""
        self._metrics["preprocess_processes_busy"].set(busy)
        self._metrics["preprocess_jobs_waiting"].set(waiting)
        self._metrics["preprocess_held_bytes"].set(held_bytes)

    def restarted(self) -> None:
        """Count a process that was replaced."""
        self._metrics["preprocess_process_restarts_total"].inc()

    def fell_back(self, reason: Fallback) -> None:
        """Count what vLLM's own code prepared."""
        self._metrics["preprocess_fallbacks_total"].labels(reason.value).inc()

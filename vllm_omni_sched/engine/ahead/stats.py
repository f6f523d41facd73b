"""Statistics of encode-ahead for vLLM's own EC connector metrics (vLLM 0.32 on; older ones only have our registry)."""

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats

from vllm_omni_sched.monitor.counts import WAIT_BUCKETS

_SECONDS, _FAILED = "encode_seconds", "failed"


class AheadStats(ECConnectorStats):
    """Durations and failures of the encodes since the last report: ``{"encode_seconds": [float, …], "failed":
    int}``.
    """

    @classmethod
    def of(cls, seconds: list[float], failed: int) -> "AheadStats":
        return cls(data={_SECONDS: seconds, _FAILED: failed})

    def reset(self) -> None:
        self.data: dict[str, Any] = {_SECONDS: [], _FAILED: 0}

    def is_empty(self) -> bool:
        return not self.data.get(_SECONDS) and not self.data.get(_FAILED)

    def aggregate(self, other: ECConnectorStats) -> "AheadStats":
        return AheadStats.of([*self.data[_SECONDS], *other.data[_SECONDS]], self.data[_FAILED] + other.data[_FAILED])

    def reduce(self) -> dict[str, int | float]:
        """Summarise the statistics for vLLM's log line."""
        seconds: list[float] = sorted(self.data[_SECONDS])
        failed: int = self.data[_FAILED]
        middle = seconds[len(seconds) // 2] if seconds else 0.0
        return {"encoded": len(seconds), "encode seconds (median)": round(middle, 4), "failed": failed}


class AheadProm(ECConnectorPromMetrics):
    """Exports ``vllm:ec_encode_ahead_seconds`` and ``vllm:ec_encode_ahead_failed`` for each engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], by_engine: dict[int, Any]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, by_engine)
        seconds = metric_types[Histogram](
            name="vllm:ec_encode_ahead_seconds",
            documentation="Wall time of encodes in the lane of encode-ahead, pauses included.",
            buckets=WAIT_BUCKETS,
            labelnames=labelnames,
        )
        failed = metric_types[Counter](
            name="vllm:ec_encode_ahead_failed",
            documentation="Items that could not be encoded ahead.",
            labelnames=labelnames,
        )
        self._seconds = {engine: seconds.labels(*values) for engine, values in by_engine.items()}
        self._failed = {engine: failed.labels(*values) for engine, values in by_engine.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for seconds in transfer_stats_data[_SECONDS]:
            self._seconds[engine_idx].observe(seconds)
        self._failed[engine_idx].inc(transfer_stats_data[_FAILED])

"""Measure whether requests meet their latency targets, as seen by the scheduler."""

from dataclasses import dataclass

from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.monitor.counts import SchedulerMetrics


@dataclass(slots=True)
class _Watch:
    sla: SlaClass
    since: float
    last: float | None = None  # when its last token came
    met: bool = True


class SloMeter:
    """TTFT and ITL by class, and the number of requests that met both targets (goodput).

    1. TTFT runs from `begin` to the first token.
    2. A gap between tokens counts once, however many tokens end it.
    3. A request meets its SLO when its TTFT and each of its gaps do. It counts when it ends on its own; one that
       is aborted by its client does not count.
    4. A session that waits for input has no gap: call `rest` for it.
    """

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics
        self._watched: dict[str, _Watch] = {}

    def __len__(self) -> int:
        return len(self._watched)

    def begin(self, request_id: str, sla: SlaClass, now: float) -> None:
        """Start the clock of a request that has arrived."""
        self._watched[request_id] = _Watch(sla, now)

    def token(self, request_id: str, now: float) -> None:
        """Record that a request got tokens."""
        watch = self._watched.get(request_id)
        if watch is None:
            return
        metrics, sla = self._metrics, watch.sla
        if watch.last is None:
            seconds = now - watch.since
            metrics.ttft_seconds[sla.name].observe(seconds)
            watch.met = watch.met and seconds <= sla.ttft_seconds
        else:
            seconds = now - watch.last
            metrics.itl_seconds[sla.name].observe(seconds)
            watch.met = watch.met and seconds <= sla.itl_seconds
        watch.last = now

    def rest(self, request_id: str, now: float) -> None:
        """Record that a session waits for input; its next token counts as a first one."""
        watch = self._watched.get(request_id)
        if watch is not None:
            watch.since, watch.last = now, None

    def end(self, request_id: str, *, counts: bool) -> None:
        """Record the end of a request; ``counts``: it was not aborted."""
        watch = self._watched.pop(request_id, None)
        if watch is not None and counts:
            metrics = self._metrics
            if watch.met:
                metrics.slo_met[watch.sla.name] += 1
            else:
                metrics.slo_missed[watch.sla.name] += 1

"""Measure whether requests meet their latency targets, as seen by the scheduler."""

from collections import deque
from dataclasses import dataclass, field

from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.monitor.counts import SchedulerMetrics


@dataclass(slots=True)
class _Watch:
    sla: SlaClass
    since: float
    last: float | None = None  # when its last token came
    met: bool = True
    idle: bool = False  # a session between two inputs
    inputs: deque[float] = field(default_factory=deque)  # when those came that have no answer yet, without the first


class SloMeter:
    """TTFT and ITL by class, and the number of requests that met both targets (goodput).

    1. TTFT runs from `begin` to the first token.
    2. A gap between tokens counts once, however many tokens end it.
    3. A request meets its SLO when its TTFT and each of its gaps do. It counts when it ends on its own; one that
       is aborted by its client does not count.
    4. Each answer of a session counts as a request does. Its TTFT runs from its input, even if that came while the
       answer before it was made. A session that waits for input has no gap.
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

    def input(self, request_id: str, now: float) -> None:
        """Record that a session got a further input."""
        watch = self._watched.get(request_id)
        if watch is None:
            return
        if watch.idle:
            watch.since, watch.idle = now, False
        else:
            watch.inputs.append(now)

    def answered(self, request_id: str) -> None:
        """Record the end of an answer of a session that goes on."""
        watch = self._watched.get(request_id)
        if watch is None or watch.idle:
            return
        self._count(watch)
        watch.last, watch.met = None, True
        watch.idle = not watch.inputs
        if watch.inputs:
            watch.since = watch.inputs.popleft()

    def end(self, request_id: str, *, counts: bool) -> None:
        """Record the end of a request; ``counts``: it was not aborted."""
        watch = self._watched.pop(request_id, None)
        if watch is not None and counts:
            self._count(watch)

    def _count(self, watch: _Watch) -> None:
        metrics = self._metrics
        if watch.met:
            metrics.slo_met[watch.sla.name] += 1
        else:
            metrics.slo_missed[watch.sla.name] += 1

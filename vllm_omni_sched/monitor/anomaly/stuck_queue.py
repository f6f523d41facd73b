"""Detect queues in which nothing finishes although there is work."""

from collections import deque
from dataclasses import dataclass
from statistics import median

from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.monitor.anomaly.statistics import gamma_quantile


@dataclass(slots=True)
class _Queue:
    seconds: deque[float]
    running_then: deque[int]
    waiting: int = 0
    running: int = 0
    peak: int = 0  # most running at once since something finished
    since: float | None = None  # since when there is work and nothing has finished
    bound: tuple[float, float] | None = None


class StuckQueue:
    """Finds a stage or replica that has work but finishes nothing.

    1. The clock starts when work arrives at an idle stage, and restarts whenever a request finishes.
    2. It may run for as long as a single service takes with probability 1 - ``beyond``, by a gamma distribution with
       the mean and variance of the last ``window`` services, and at least as long as the longest of those.
       With several running at once, the next one finishes sooner than that.
    3. More running at once than usual raises the bound in proportion: a batch that starts together may end together.
    4. The bound is between ``floor_seconds`` and ``cap_seconds``; before ``least_samples`` services it is the cap.
    """

    def __init__(
        self,
        beyond: float = 1e-6,
        floor_seconds: float = 1.0,
        cap_seconds: float = 600.0,
        least_samples: int = 32,
        window: int = 256,
    ) -> None:
        self.beyond = beyond
        self.floor_seconds = floor_seconds
        self.cap_seconds = cap_seconds
        self.least_samples = least_samples
        self.window = window
        self._queues: dict[str, _Queue] = {}

    def observe(self, subject: str, now: float, waiting: int, running: int) -> None:
        """Record how many requests wait and run there now."""
        queue = self._queues.setdefault(subject, _Queue(deque(maxlen=self.window), deque(maxlen=self.window)))
        if not waiting and not running:
            queue.since, queue.peak = None, 0
        elif queue.since is None:
            queue.since = now
        queue.waiting, queue.running = waiting, running
        queue.peak = max(queue.peak, running)

    def finished(self, subject: str, now: float, service_seconds: float) -> None:
        """Record that a request finished after running for so long without its wait; call `observe` first for the rest.

        Do not call it for an aborted request, which is no progress.
        """
        queue = self._queues.get(subject)
        if queue is None:
            return
        queue.seconds.append(max(service_seconds, 0.0))
        queue.running_then.append(max(queue.peak, 1))
        queue.bound = None
        busy = queue.waiting or queue.running
        queue.since, queue.peak = (now if busy else None), queue.running

    def bound_seconds(self, subject: str) -> float:
        """Return for how long nothing may finish there while there is work."""
        queue = self._queues.get(subject)
        if queue is None or len(queue.seconds) < self.least_samples:
            return self.cap_seconds
        if queue.bound is None:
            longest = max(max(queue.seconds), gamma_quantile(queue.seconds, self.beyond))
            queue.bound = longest, median(queue.running_then)
        seconds, usual = queue.bound
        return min(max(seconds * max(1.0, queue.peak / usual), self.floor_seconds), self.cap_seconds)

    def check(self, now: float) -> tuple[Anomaly, ...]:
        """Return all stuck queues."""
        found = []
        for subject, queue in self._queues.items():
            if queue.since is None:
                continue
            bound, seconds = self.bound_seconds(subject), now - queue.since
            if seconds > bound:
                evidence = {
                    "seconds": seconds,
                    "bound_seconds": bound,
                    "waiting": float(queue.waiting),
                    "running": float(queue.running),
                }
                found.append(Anomaly(AnomalyKind.STUCK_QUEUE, subject, queue.since + bound, evidence))
        return tuple(found)

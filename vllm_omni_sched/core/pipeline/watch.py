"""Watch the stages of a pipeline for requests that hang and queues that stand still."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm_omni_sched.config.stage_options import AnomalyOptions
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.core.pipeline.stage import StageScheduler
from vllm_omni_sched.graph.stages import StageGraph
from vllm_omni_sched.monitor.anomaly.news import News
from vllm_omni_sched.monitor.anomaly.stage_timeout import StageTimeout
from vllm_omni_sched.monitor.anomaly.stuck_queue import StuckQueue


class PipelineWatch:
    """Feeds the detectors of what the core can see, and returns what they find.

    1. A request is in a stage from its start on a replica until it ends there (`StageTimeout`).
    2. A stage has work while requests wait or run (`StuckQueue`).
    3. Checks are ``interval_seconds`` apart. An anomaly is returned when it begins, and again if it comes back.

    Memory and edges are measured outside the core; drivers feed the detectors of these.

    Args:
        options: options of the detectors.
        graph: the stages, for their names.
    """

    def __init__(self, options: AnomalyOptions, graph: StageGraph) -> None:
        self._interval_seconds = options.interval_seconds
        self._names = {stage.stage_id: str(stage) for stage in graph.stages}
        self._stays = StageTimeout(cap_seconds=options.max_stage_seconds)
        self._queues = StuckQueue(cap_seconds=options.max_stage_seconds)
        self._news = News()
        self._next = float("-inf")

    def after(self, actions: Iterable[e.Action], now: float) -> None:
        """Record what starts and what ends."""
        for action in actions:
            match action:
                case e.Start(work):
                    self._stays.enter(self._names[work.stage_id], work.request_id, now)
                case e.Ended(work, _, ok):
                    self._ended(work, now, ok)
                case e.Gone(work) | e.Lost(work):
                    self._ended(work, now, ok=False)
                case _:
                    pass

    def _ended(self, work: StageWork, now: float, ok: bool) -> None:
        name = self._names[work.stage_id]
        self._stays.observe(name, work.request_id, now, finished=ok)
        if ok and work.started is not None:
            self._queues.finished(name, now, max(now - work.started, 0.0))

    def check(self, stages: Mapping[int, StageScheduler], now: float) -> list[e.Action]:
        """Return the anomalies that have begun since the last check."""
        if now < self._next:
            return []
        self._next = now + self._interval_seconds
        for stage_id, stage in stages.items():
            self._queues.observe(self._names[stage_id], now, len(stage.waiting), len(stage.running))
        found = (*self._stays.check(now), *self._queues.check(now))
        ids = {name: stage_id for stage_id, name in self._names.items()}
        return [e.AnomalyBegins(ids[one.subject], one) for one in self._news.begun(found)]

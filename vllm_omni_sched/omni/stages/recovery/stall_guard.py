"""Fail requests that make no progress in their stage, instead of keeping their clients waiting forever."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.recovery.events import FailReason
from vllm_omni_sched.monitor.recovery.stalled import RequestView, StalledRequests

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator

logger = get_logger(__name__)

OPTION = "runtime.stall_seconds"


class StallGuard:
    """Shows the requests of a pipeline to `StalledRequests`, and fails those that stall.

    Args:
        deadline_seconds: longest time without progress; None: no request fails.
    """

    def __init__(self, orchestrator: ScheduledOrchestrator, deadline_seconds: float | None) -> None:
        self._orchestrator = orchestrator
        self._stalled = StalledRequests(deadline_seconds)

    def __len__(self) -> int:
        """Return the number of requests that are watched."""
        return len(self._stalled)

    def arrived(self, request_id: str) -> None:
        """Watch a request that has arrived."""
        self._stalled.arrived(request_id, self._orchestrator.clock())

    def progressed(self, request_ids: Iterable[str]) -> None:
        """Record progress of these requests."""
        now, parent_of = self._orchestrator.clock(), self._orchestrator._cfg_tracker.get_parent_id
        for request_id in request_ids:
            self._stalled.progressed(request_id, now, parent_of(request_id))

    def forget(self, request_id: str) -> None:
        """Forget a request that has left."""
        self._stalled.forget(request_id)

    def check(self, now: float) -> None:
        """Fail requests that stall."""
        for request_id, seconds in self._stalled.overdue(now, self._view):
            stage_id, where = self._place(request_id)
            logger.error("request %s fails: it makes no progress in stage %d (%s)", request_id, stage_id, where)
            why = (
                f"{where} has made no progress with it for {seconds:.4g} s, longer than option "
                f"'{OPTION}' ({self._stalled.deadline_seconds:g}) allows ({FailReason.STALLED.value})"
            )
            fail = self._orchestrator.recovery.fail(request_id, stage_id, why, FailReason.STALLED)
            self._orchestrator.spawn(fail)

    def _view(self, request_id: str) -> RequestView | None:
        state = self._orchestrator.request_states.get(request_id)
        if state is None:
            return None
        return RequestView(self._waits(request_id), state.streaming.enabled, state.session_owned)

    def _waits(self, request_id: str) -> bool:
        orchestrator = self._orchestrator
        return orchestrator.recovery.is_waiting(request_id) or any(
            pool.queue.leader_of(request_id) in pool.queue.waiting for pool in orchestrator.stage_pools
        )

    def _place(self, request_id: str) -> tuple[int, str]:
        """Return the first stage that has the request, and where in it."""
        orchestrator = self._orchestrator
        for pool in orchestrator.stage_pools:
            leader = pool.queue.leader_of(request_id)
            work = pool.queue.running.get(leader)
            if work is not None and work.sent:
                owed = orchestrator.recovery.handovers.to_stage(work.request_id, pool.stage_id)
                lacks = ""
                if owed is not None:
                    lacks = f" (its input from stage {owed.stage_id} replica {owed.replica_id} may not have arrived)"
                return pool.stage_id, f"replica {work.replica_id}{lacks}"
            if leader in pool.queue.waiting:
                return pool.stage_id, "the queue of the stage"
        state = orchestrator.request_states[request_id]
        stage_id = max(state.stage_submit_ts, default=0)
        known = orchestrator.driver.known.get(request_id)
        replica_id = None if known is None else known.replicas.get(stage_id)
        return stage_id, "the stage" if replica_id is None else f"replica {replica_id}"

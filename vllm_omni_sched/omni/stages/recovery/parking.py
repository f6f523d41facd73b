"""Keep requests for a stage that has no replica now, but will have one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.core.pipeline.recovery import PipelineRecovery
from vllm_omni_sched.monitor.recovery.events import FailReason

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator

Resume = Callable[[], Coroutine[Any, Any, None]]
Fail = Callable[[str, int, str, FailReason], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Parked:
    """Holds a request that waits, and the function that resumes it."""

    request_id: str
    resume: Resume
    since: float


class Parking:
    """Keeps requests for a stage without a replica until it has one, or the core says that they fail (`Unserved`).

    Args:
        recovery: recovery in the core; None if it is off, and nothing is kept.
        fail: fails a request at a stage with a reason.
    """

    def __init__(self, orchestrator: ScheduledOrchestrator, recovery: PipelineRecovery | None, fail: Fail) -> None:
        self._orchestrator, self._recovery, self._fail = orchestrator, recovery, fail
        self.parked: dict[int, list[Parked]] = {}  # by stage

    def park(self, stage_id: int, resume: Resume, request_id: str) -> bool:
        """Keep the request if the stage has no replica but will have one, and return whether it is kept."""
        pool = self._orchestrator.stage_pools[stage_id]
        if self._recovery is None or pool.live_replica_ids() or not self._recovery.expects_replica(stage_id):
            return False
        self.parked.setdefault(stage_id, []).append(Parked(request_id, resume, self._orchestrator.clock()))
        return True

    def unpark(self, stage_id: int) -> None:
        """Resume the requests of a stage that has a replica again."""
        for one in self.parked.pop(stage_id, []):
            self._orchestrator.spawn(one.resume())

    def forget(self, request_id: str, stage_id: int | None = None) -> bool:
        """Drop a request that has left or resumes from an earlier stage; return whether it was kept here.

        Args:
            stage_id: for this stage only; None: for all.
        """
        before = sum(map(len, self.parked.values()))
        for at, kept in self.parked.items():
            if stage_id is None or at == stage_id:
                kept[:] = [one for one in kept if one.request_id != request_id]
        return sum(map(len, self.parked.values())) < before

    def fail(self, stage_id: int, until: float, why: str, reason: FailReason) -> None:
        """Fail the requests that came to the stage by then."""
        kept = self.parked.pop(stage_id, [])
        self.parked[stage_id] = [one for one in kept if one.since > until]
        for one in kept:
            if one.since <= until:
                self._orchestrator.spawn(self._fail(one.request_id, stage_id, why, reason))

"""Keep requests for a stage that has no replica now, but will have one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.monitor.recovery.events import FailReason
from vllm_omni_sched.monitor.recovery.policy import Recovery

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

Resume = Callable[[], Coroutine[Any, Any, None]]
Fail = Callable[[str, int, str, FailReason], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Parked:
    """Holds a request that waits, and the function that resumes it."""

    request_id: str
    resume: Resume
    since: float


class Parking:
    """Keeps requests for a stage without a replica, for at most the policy's ``max_wait_seconds``.

    Args:
        policy: the policy of recovery; None if it is off, and nothing is kept.
        fail: fails a request at a stage with a reason.
    """

    def __init__(self, orchestrator: ScheduledOrchestrator, policy: Recovery | None, fail: Fail) -> None:
        self._orchestrator, self._policy, self._fail = orchestrator, policy, fail
        self.parked: dict[int, list[Parked]] = {}  # by stage
        self._empty_since: dict[int, float] = {}  # stages without a replica

    def park(self, stage_id: int, resume: Resume, request_id: str) -> bool:
        """Keep the request if the stage has no replica but will have one, and return whether it is kept."""
        pool = self._orchestrator.stage_pools[stage_id]
        if self._policy is None or pool.live_replica_ids() or not self._policy.coming(stage_id):
            return False
        self.parked.setdefault(stage_id, []).append(Parked(request_id, resume, self._orchestrator.clock()))
        return True

    def unpark(self, stage_id: int) -> None:
        """Resume the requests of a stage that has a replica again."""
        for one in self.parked.pop(stage_id, []):
            self._orchestrator.spawn(one.resume())

    def forget(self, request_id: str) -> bool:
        """Drop a request that has left or is run resume from an earlier stage; return whether it was kept here."""
        before = sum(map(len, self.parked.values()))
        for kept in self.parked.values():
            kept[:] = [one for one in kept if one.request_id != request_id]
        return sum(map(len, self.parked.values())) < before

    def tick(self, now: float) -> None:
        """Fail requests that have waited too long, or whose stage will have no replica."""
        if self._policy is None:
            return
        for pool in self._orchestrator.stage_pools:
            if pool.live_replica_ids():
                self._empty_since.pop(pool.stage_id, None)
                continue
            since = self._empty_since.setdefault(pool.stage_id, now)
            if not self._policy.coming(pool.stage_id):
                self._fail_all(pool, now, "it has no replica, and none is being restarted", FailReason.NO_REPLICA)
            elif (first := now - self._policy.options.max_wait_seconds) >= since:
                self._fail_all(pool, first, "it has had no replica for too long", FailReason.WAITED)

    def _fail_all(self, pool: ScheduledPool, until: float, why: str, reason: FailReason) -> None:
        """Fail the requests that came to the stage by then."""
        waiting = [name for name, work in pool.queue.waiting.items() if work.arrived <= until]
        names = [receiver for name in waiting for receiver in pool.queue.receivers(name)]
        kept = self.parked.pop(pool.stage_id, [])
        self.parked[pool.stage_id] = [one for one in kept if one.since > until]
        for request_id in [*names, *(one.request_id for one in kept if one.since <= until)]:
            self._orchestrator.spawn(self._fail(request_id, pool.stage_id, why, reason))

"""Requests for a stage that has no replica now, and will have one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.monitor.recovery.events import FailReason
from vllm_omni_sched.monitor.recovery.policy import Recovery

Again = Callable[[], Coroutine[Any, Any, None]]
Fail = Callable[[str, int, str, FailReason], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Parked:
    """A request, and how it goes on."""

    request_id: str
    again: Again
    since: float


class Parking:
    """Keeps what comes to a stage without a replica, no longer than ``max_wait_seconds`` of the policy.

    Args:
        orchestrator: ours.
        policy: None where nothing is repaired; then nothing is kept.
        fail: a request, at a stage, with a reason.
    """

    def __init__(self, orchestrator: Any, policy: Recovery | None, fail: Fail) -> None:
        self._orchestrator, self._policy, self._fail = orchestrator, policy, fail
        self.kept: dict[int, list[Parked]] = {}  # by stage
        self._empty_since: dict[int, float] = {}  # stages without a replica

    def parks(self, stage_id: int, again: Again, request_id: str) -> bool:
        """Whether a request waits here until the stage has a replica."""
        pool = self._orchestrator.stage_pools[stage_id]
        if self._policy is None or pool.live_replica_ids() or not self._policy.coming(stage_id):
            return False
        self.kept.setdefault(stage_id, []).append(Parked(request_id, again, self._orchestrator.clock()))
        return True

    def unpark(self, stage_id: int) -> None:
        """A replica is there."""
        for one in self.kept.pop(stage_id, []):
            self._orchestrator.spawn(one.again())

    def forget(self, request_id: str) -> bool:
        """The request has left, or is run again from an earlier stage. Whether it was kept here."""
        before = sum(map(len, self.kept.values()))
        for kept in self.kept.values():
            kept[:] = [one for one in kept if one.request_id != request_id]
        return sum(map(len, self.kept.values())) < before

    def tick(self, now: float) -> None:
        """Let those fail that have waited too long, or in vain."""
        if self._policy is None:
            return
        for pool in self._orchestrator.stage_pools:
            if pool.live_replica_ids():
                self._empty_since.pop(pool.stage_id, None)
                continue
            since = self._empty_since.setdefault(pool.stage_id, now)
            if not self._policy.coming(pool.stage_id):
                self._fail_all(pool, now, "it has no replica, and will have none", FailReason.NO_REPLICA)
            elif (first := now - self._policy.options.max_wait_seconds) >= since:
                self._fail_all(pool, first, "it has had no replica for too long", FailReason.WAITED)

    def _fail_all(self, pool: Any, until: float, why: str, reason: FailReason) -> None:
        """Those that came to the stage by then."""
        waiting = [name for name, work in pool.queue.waiting.items() if work.arrived <= until]
        names = [receiver for name in waiting for receiver in pool.queue.receivers(name)]
        kept = self.kept.pop(pool.stage_id, [])
        self.kept[pool.stage_id] = [one for one in kept if one.since > until]
        for request_id in [*names, *(one.request_id for one in kept if one.since <= until)]:
            self._orchestrator.spawn(self._fail(request_id, pool.stage_id, why, reason))

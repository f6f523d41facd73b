"""Describe works of stages that branch, and remove payloads that no stage reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.omni.stages import sharing
from vllm_omni_sched.omni.stages.branches.payloads import Edge, EdgePayloads
from vllm_omni_sched.omni.stages.recovery import recovery_driver
from vllm_omni_sched.omni.stages.sharing import Sharing
from vllm_omni_sched.omni.stages.work import Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.branches.orchestrator import BranchingOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool


class UnreadPayloads(Sharing):
    """Tracks the payloads of stages that branch until a stage reads them.

    1. No work is shared: each request runs by itself in all its stages.
    2. A payload that was sent for a request, to a stage that has put out nothing yet, is removed when the request
       leaves, or needs the stage no longer.
    """

    _orchestrator: BranchingOrchestrator
    _payloads: EdgePayloads

    def __init__(self, orchestrator: BranchingOrchestrator, payloads: EdgePayloads) -> None:
        super().__init__(orchestrator, payloads)
        # by request and edge: how long to look for a payload that is no longer needed; a replica may have taken it
        self._lying: dict[str, dict[Edge, float]] = {}

    def describe(
        self, pool: ScheduledPool, request_id: str, state: Any, request: Any, submit_args: dict[str, Any], now: float
    ) -> Work:
        work: Work = self._orchestrator.driver.describe(pool, request_id, state, request, submit_args, now)
        return work

    def leads(self, pool: ScheduledPool, work: Work) -> None:
        pass

    def inherits(self, owner: str, heir: Work) -> None:
        raise AssertionError(f"{owner} has no heir, as no work is shared")

    def on_first_output(self, stage_id: int, receivers: Sequence[str]) -> None:
        pass

    def ended(self, stage_id: int, request_id: str, receivers: Sequence[str]) -> None:
        for target in self._orchestrator.sent_for(request_id, stage_id):
            self.sent(request_id, (stage_id, target))

    def sent(self, request_id: str, edge: Edge) -> None:
        """Record that a payload for the request lies, or will lie, on an edge."""
        self._lying.setdefault(request_id, {})[edge] = sharing.PAYLOAD_SECONDS

    def lost(self, request_id: str, edge: Edge) -> None:
        """Record that no payload will lie there unless it is made again."""
        self._drop(request_id, [edge])

    def payload_read(self, work: Work) -> None:
        edges = self._lying.get(work.request_id, {})
        edges.update(dict.fromkeys(self._into(work.request_id, work.stage_id), recovery_driver.HELD_SECONDS))

    def arrived(self, request_id: str, stage_id: int) -> None:
        """Record that a stage has read its payloads."""
        self._drop(request_id, self._into(request_id, stage_id))

    def unneeded(self, request_id: str, stage_id: int) -> None:
        """Remove the payloads for a stage that a request needs no longer."""
        for edge in self._into(request_id, stage_id):
            self._remove(request_id, edge, self._lying[request_id][edge])
        self.arrived(request_id, stage_id)

    def forget(self, request_id: str) -> None:
        for edge, seconds in self._lying.pop(request_id, {}).items():
            self._remove(request_id, edge, seconds)

    def _into(self, request_id: str, stage_id: int) -> list[Edge]:
        return [edge for edge in self._lying.get(request_id, ()) if edge[1] == stage_id]

    def _drop(self, request_id: str, edges: Sequence[Edge]) -> None:
        for edge in edges:
            self._lying.get(request_id, {}).pop(edge, None)
        if not self._lying.get(request_id, True):
            del self._lying[request_id]

    def _remove(self, request_id: str, edge: Edge, seconds: float) -> None:
        name = self._orchestrator.run_name(request_id, edge[1])
        take = partial(self._payloads.discard_from, edge, name)
        self._orchestrator.spawn(self._when_there(take, seconds))

"""Track outputs on the edges of stages that branch."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_omni_sched.omni.stages.branches.payloads import Edge
from vllm_omni_sched.omni.stages.recovery.handover import Handover


class EdgeHandovers:
    """Tracks each output from the end of its stage until a stage that reads it shows that it has its inputs.

    1. A handover begins for each stage that the output is for, when a replica has finished the work.
    2. It ends with the first output of that stage, when that stage or the sender runs again, or when the request leaves
       or needs the stage no longer.
    """

    def __init__(self) -> None:
        self._open: dict[str, dict[Edge, Handover]] = {}  # by request

    def __len__(self) -> int:
        """Return the number of requests with an output that may not have arrived."""
        return len(self._open)

    def finished(self, stage_id: int, replica_id: int, request_id: str, targets: Iterable[int]) -> None:
        """Record that a replica has finished a stage for a request, whose output goes to these stages."""
        for target in targets:
            one = Handover(request_id, stage_id, replica_id, request_id)
            self._open.setdefault(request_id, {})[stage_id, target] = one

    def arrived(self, request_id: str, stage_id: int) -> None:
        """Record that a stage has all its inputs, or does not need them any more."""
        self._drop(request_id, [edge for edge in self._open.get(request_id, ()) if edge[1] == stage_id])

    def runs_again(self, request_id: str, stage_id: int) -> None:
        """Record that a stage runs, and sends its output later."""
        self._drop(request_id, [edge for edge in self._open.get(request_id, ()) if edge[0] == stage_id])

    def of_replica(self, stage_id: int, replica_id: int) -> list[Handover]:
        """Return the outputs of this replica that may not have been sent."""
        return [one for _, one in self.edges_of_replica(stage_id, replica_id)]

    def edges_of_replica(self, stage_id: int, replica_id: int) -> list[tuple[Edge, Handover]]:
        """Return the outputs of this replica that may not have been sent, with their edges."""
        return [
            (edge, one)
            for edges in self._open.values()
            for edge, one in edges.items()
            if (one.stage_id, one.replica_id) == (stage_id, replica_id)
        ]

    def to_stage(self, request_id: str, stage_id: int) -> Handover | None:
        """Return an input that the stage may still wait for; None if all have arrived or pass the front end."""
        edges = self._open.get(request_id, {})
        return next((one for edge, one in edges.items() if edge[1] == stage_id), None)

    def forget(self, request_id: str) -> None:
        """Forget a request that has left."""
        self._open.pop(request_id, None)

    def _drop(self, request_id: str, edges: list[Edge]) -> None:
        for edge in edges:
            del self._open[request_id][edge]
        if request_id in self._open and not self._open[request_id]:
            del self._open[request_id]

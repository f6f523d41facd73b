"""Represent one request at one stage, as submitted by vLLM-Omni."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.omni.stages.requests import Known

UNPLACED = -1  # replica of a request that waits, or whose work another one does


@dataclass
class Work:
    """A submission to a stage, with the arguments of `StagePool.submit_initial`.

    ``runs_as``: its name in the engine.
    """

    request_id: str
    stage_id: int
    state: Any  # OrchestratorRequestState
    request: Any  # the request as sent to the engine
    how: dict[str, Any]  # the other arguments
    known: Known
    arrived: float  # at this stage
    cost_seconds: float = 0.0
    key: str | None = None  # of its content, if others may share the work
    replica_id: int = UNPLACED
    started: float | None = None
    runs: int = 0
    again: bool = False  # recovery has placed it
    sent: bool = False
    spoke: bool = False

    @property
    def runs_as(self) -> str:
        name: str = getattr(self.request, "request_id", self.request_id)
        return name

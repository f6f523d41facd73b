"""Represent one request at one stage, as submitted by vLLM-Omni."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_omni_sched.core.pipeline.requests import UNPLACED, StageWork

__all__ = ["UNPLACED", "Work"]


@dataclass(eq=False, kw_only=True)
class Work(StageWork):
    """Represents a submission to a stage, with the arguments of `StagePool.submit_initial`.

    ``runs_as``: its name in the engine. ``shown``: whether a part of its output has gone on to clients.
    """

    state: Any  # OrchestratorRequestState
    request: Any  # the request as sent to the engine
    submit_args: dict[str, Any]  # the other arguments
    shown: bool = False

    @property
    def runs_as(self) -> str:
        name: str = getattr(self.request, "request_id", self.request_id)
        return name

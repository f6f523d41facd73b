"""Options of the preprocessing pool, with their defaults, bounds and meaning."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.config.units import Bytes
from vllm_omni_sched.graph.order import SlaClass

MIB, GIB = 1 << 20, 1 << 30


class PreprocessOptions(BaseModel):
    """All options of the preprocessing pool. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    processes: int = Field(
        0, ge=0, le=256, description="Number of preprocessing processes; 0: vLLM preprocesses in its API process."
    )
    nice: int = Field(10, ge=0, le=19, description="Niceness of these processes, added to that of the server.")
    max_bytes: Bytes = Field(
        2 * GIB,
        ge=MIB,
        description="Memory for results that the API process has not taken yet, in bytes; further requests wait. Also "
        "the largest result.",
    )
    worker_memory_bytes: Bytes = Field(
        4 * GIB,
        ge=128 * MIB,
        description="Private memory of one process beyond what it shares with the server; a request that needs more "
        "fails.",
    )
    max_waiting: int = Field(
        1024, ge=1, description="Most requests that wait for a process; further ones wait in vLLM's own queue."
    )
    max_wait_seconds: float = Field(
        10.0, gt=0.0, description="Time after which a waiting request goes before those of other classes, in seconds."
    )
    realtime_deadline_seconds: float = Field(
        10.0, gt=0.0, description="Time after which preprocessing of a realtime request fails, in seconds."
    )
    interactive_deadline_seconds: float = Field(
        60.0, gt=0.0, description="Time after which preprocessing of an interactive request fails, in seconds."
    )
    batch_deadline_seconds: float = Field(
        600.0, gt=0.0, description="Time after which preprocessing of a batch request fails, in seconds."
    )

    def deadline_seconds(self, sla: SlaClass) -> float:
        """Return the time limit of a class, in seconds."""
        seconds: float = getattr(self, f"{sla.name}_deadline_seconds")
        return seconds

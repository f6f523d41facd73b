"""Options of the preprocessing pool, with their defaults, bounds and meaning."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.config.units import Bytes

MIB, GIB = 1 << 20, 1 << 30
WORKER_MEMORY_BYTES = 4 * GIB
"""Private memory of one process beyond what it shares with the server; a request that needs more fails."""
MOST_WAITING = 1024
"""Most requests that wait for a process; further ones wait in vLLM's own queue."""
DEADLINE_SECONDS = {"realtime": 10.0, "interactive": 60.0, "batch": 600.0}
"""Time after which preprocessing of a request of a class fails."""


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
    max_wait_seconds: float = Field(
        10.0, gt=0.0, description="Time after which a waiting request goes before those of other classes, in seconds."
    )

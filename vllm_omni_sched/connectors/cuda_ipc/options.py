"""Options of tensors that stay on their device."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.bounds import MemoryBytes

MIB, GIB = 1 << 20, 1 << 30


class CudaIpcOptions(BaseModel):
    """Options of the transport from device to device. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_bytes: MemoryBytes = Field(
        4 * MIB,
        ge=1,
        description="Device tensors of a message that have fewer bytes together go through host memory: a handle "
        "would cost more. On an H200, 1 MB takes 1.1 ms by handle and 0.6 ms through host memory, 16 MB 1.1 and 4.0.",
    )
    max_held_bytes: MemoryBytes = Field(
        2 * GIB,
        ge=0,
        description="Device memory that messages on their way may take, per sending process; what is more goes "
        "through host memory.",
    )
    copy_out: bool = Field(
        True,
        description="Receivers get copies, made on the device; false: views of the sender's memory, which has to "
        "live as long as they are looked at.",
    )


class CudaIpcConnectorOptions(CudaIpcOptions):
    """Options of the transport from device to device, with those of its arena."""

    arena: ArenaOptions = Field(ArenaOptions(), description="Options of the arena that messages go through.")

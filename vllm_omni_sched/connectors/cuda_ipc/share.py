"""The policy of which tensors stay on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.bounds import MemoryBytes


class ShareReason(str, Enum):
    """Reason why device tensors were sent as a handle, or through host memory."""

    SHARED = "shared"  # sent as a handle; with all other reasons, through host memory
    SMALL = "small"  # fewer bytes than `min_bytes`
    NO_DEVICE = "no_device"  # this process cannot share them
    NO_RECEIVER = "no_receiver"  # no receiver that uses a device has asked for messages of the edge
    UNREACHABLE = "unreachable"  # a receiver of the edge cannot see the device
    HELD = "held"  # messages in flight hold `max_held_bytes`
    ALLOCATOR = "allocator"  # the allocator's memory cannot be shared: expandable segments, cudaMallocAsync
    NO_MEMORY = "no_memory"  # no free memory on the device for the copy
    REFUSED = "refused"  # refused by the driver, or by the file system of the announcements


@dataclass(frozen=True)
class Load:
    """Device tensors of one message on one device.

    ``receivers``: what each receiver of the edge can see; nothing, where it has no device, or uses none yet.
    """

    device: str
    nbytes: int
    receivers: Sequence[frozenset[str]]
    held_bytes: int
    obstacle: ShareReason | None = None


def plan(load: Load, min_bytes: int, max_held_bytes: int) -> ShareReason:
    """Decide how device tensors are sent.

    1. Small tensors go through host memory.
    2. A handle is sent only if all receivers have announced that they can open it, because any may get the message.
    3. Memory held by messages in flight is bounded.
    """
    if load.nbytes < min_bytes:
        return ShareReason.SMALL
    if load.obstacle is not None:
        return load.obstacle
    if not any(load.receivers):
        return ShareReason.NO_RECEIVER
    if not all(load.device in seen for seen in load.receivers):
        return ShareReason.UNREACHABLE
    if load.held_bytes + load.nbytes > max_held_bytes:
        return ShareReason.HELD
    return ShareReason.SHARED


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

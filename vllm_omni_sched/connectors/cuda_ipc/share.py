"""Interface that makes and opens handles of device memory, and the policy of which tensors stay on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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


class DeviceShare(ABC):
    """Interface that makes a block of device memory available in another process.

    A handle is plain bytes and goes with the message. `CudaShare` opens the sender's memory itself. With NIXL or UCX
    `share` would register the block, `open` read it into a block of the receiver's, and `release` take it back; what
    is asked of all of them:

    1. A block that was shared is what it was when `share` was called, for work that comes later on the stream that is
       current in `open`. Neither call waits for the device.
    2. It stays so until `release`, which is called once, by the process that shared it.
    3. An opened block is good as long as ``keep`` is held, and nothing of it is used once ``keep`` is let go.
    """

    @abstractmethod
    def devices(self) -> frozenset[str]:
        """Return the devices whose memory this process can open, as far as known, by names common to the host."""

    @abstractmethod
    def device_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of a tensor's device; None for tensors that it does not share."""

    @abstractmethod
    def obstacle(self) -> ShareReason | None:
        """Return why nothing can be shared from here, as far as known; None if it can."""

    @abstractmethod
    def allocate(self, like: torch.Tensor, nbytes: int) -> torch.Tensor | ShareReason:
        """Allocate a block, shape (nbytes,), uint8, on the device of ``like``; return a reason if that fails."""

    @abstractmethod
    def share(self, block: torch.Tensor) -> bytes | ShareReason:
        """Return a handle of a block from `allocate`, with all work on it that is queued on the current stream."""

    @abstractmethod
    def open(self, handle: bytes, keep: Any, copy: bool) -> torch.Tensor:
        """Open the block of a handle, shape (nbytes,), uint8, in order with the current stream.

        Args:
            keep: held until nothing looks at the sender's memory any more: by the block itself, or by `collect`.
            copy: the block is a copy on the device.

        Raises:
            CorruptMessageError: it is no handle.
            DeviceLostError: its sender is dead, or it cannot be opened here.
        """

    @abstractmethod
    def release(self, handle: bytes) -> None:
        """Free a block that no receiver uses, or will use."""

    @abstractmethod
    def collect(self) -> int:
        """Release what the device has finished with, at little cost; return how many blocks."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget everything without freeing it, in a forked child, to which none of it belongs."""

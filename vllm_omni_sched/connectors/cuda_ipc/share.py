"""What makes a handle of device memory, and memory of a handle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.connectors.cuda_ipc.plan import ShareReason

if TYPE_CHECKING:
    import torch


class DeviceShare(ABC):
    """One way for a block of device memory to be had in another process.

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
        """Names, the same in all processes of the host, of devices whose memory this process can open, as far as is
        known."""

    @abstractmethod
    def device_of(self, tensor: torch.Tensor) -> str | None:
        """Name of the device a tensor is on; None for what it does not share."""

    @abstractmethod
    def obstacle(self) -> ShareReason | None:
        """Why nothing can be shared from here, as far as is known."""

    @abstractmethod
    def allocate(self, like: torch.Tensor, nbytes: int) -> torch.Tensor | ShareReason:
        """A block, shape (nbytes,), uint8, on the device of ``like``; a reason where there is none to be had."""

    @abstractmethod
    def share(self, block: torch.Tensor) -> bytes | ShareReason:
        """A handle of a block from `allocate`, with all work on it that is queued on the current stream."""

    @abstractmethod
    def open(self, handle: bytes, keep: Any, copy: bool) -> torch.Tensor:
        """The block of a handle, shape (nbytes,), uint8, in order with the current stream.

        Args:
            keep: held until nothing looks at the sender's memory any more: by the block itself, or by `collect`.
            copy: the block is a copy on the device.

        Raises:
            CorruptMessageError: it is no handle.
            DeviceLostError: its sender is dead, or it cannot be opened here.
        """

    @abstractmethod
    def release(self, handle: bytes) -> None:
        """Nobody needs the block any more: neither opened it, nor will."""

    @abstractmethod
    def collect(self) -> int:
        """Let go of what the device has finished with, at little cost; how many blocks."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of nothing: called in a forked child, to which none of it belongs."""

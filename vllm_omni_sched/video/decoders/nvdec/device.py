"""A GPU as used through torch, and the copy of finished frames to the host, or to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class HostSlots:
    """Fills slots in host memory through two pinned frames: one is transferred while the other is copied to its slot.

    Args:
        frames: the output, slots of ``height * width * 3`` bytes.
        device: the GPU, which provides pinned memory and events.
    """

    def __init__(self, frames: memoryview, height: int, width: int, device: Device) -> None:
        import torch

        nbytes = height * width * 3
        whole = torch.frombuffer(frames, dtype=torch.uint8, count=len(frames) // nbytes * nbytes)
        self._slots = whole.view(-1, height, width, 3)
        self._device = device
        self._pinned = [device.pinned(height, width) for _ in range(2)]
        self._in_transfer: list[tuple[int, Any] | None] = [None, None]
        self._turn = 0

    def put(self, slot: int, frame: torch.Tensor) -> None:
        """Store a frame, uint8 of shape (height, width, 3), without waiting for the device."""
        self._complete(self._turn)
        self._pinned[self._turn].copy_(frame, non_blocking=True)
        self._in_transfer[self._turn] = (slot, self._device.recorded())
        self._turn = 1 - self._turn

    def finish(self) -> None:
        """Complete all stored frames, so that readers can use them."""
        for turn in (self._turn, 1 - self._turn):
            self._complete(turn)

    def _complete(self, turn: int) -> None:
        if (transfer := self._in_transfer[turn]) is None:
            return
        slot, event = transfer
        event.synchronize()
        self._slots[slot].copy_(self._pinned[turn])
        self._in_transfer[turn] = None


class DeviceSlots:
    """Fills slots in memory of a device, which may be another one than that of the frames.

    Args:
        room: the output, uint8, slots of ``height * width * 3`` bytes.
        device: the GPU of the frames.
    """

    def __init__(self, room: torch.Tensor, height: int, width: int, device: Device) -> None:
        nbytes = height * width * 3
        slots = room.shape[0] // nbytes
        self._slots = room[: slots * nbytes].view(slots, height, width, 3)
        self._device = device

    def put(self, slot: int, frame: torch.Tensor) -> None:
        """Store a frame, uint8 of shape (height, width, 3), without waiting for the device."""
        self._slots[slot].copy_(frame, non_blocking=True)

    def finish(self) -> None:
        """Complete all stored frames, so that other processes can use them."""
        self._device.finish()


class Device:
    """Uses a GPU through torch."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu

    def use(self) -> None:
        """Make it the current device of this thread, with a context, which the library then uses."""
        import torch

        torch.cuda.set_device(self._gpu)
        torch.cuda.current_stream()

    def pinned(self, height: int, width: int) -> torch.Tensor:
        import torch

        return torch.empty((height, width, 3), dtype=torch.uint8, pin_memory=True)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Return memory of the GPU of which the content does not matter, shape (nbytes,), uint8."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self._gpu}")

    def finish(self) -> None:
        """Wait for the work of the current stream."""
        import torch

        torch.cuda.current_stream().synchronize()

    def recorded(self) -> Any:
        """Return an event behind the work of the current stream, with ``synchronize()``."""
        import torch

        event = torch.cuda.Event()
        event.record()
        return event

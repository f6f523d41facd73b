"""Memory of one device for decoded frames, into which the decoder processes of all devices write.

One block is allocated and shared once, before the decoders enter their sandbox. A decoder of the same device copies
within it, one of another device over the link between the two.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.video.frame_memory import BLOCK, FrameRooms, return_room

if TYPE_CHECKING:
    import torch

    from vllm_omni_sched.connectors.cuda_ipc.driver import Driver

SCRATCH_BYTES = 8 << 20
"""Bytes behind the rooms, into which decoders copy to measure their link."""

_MEASURED_COPIES = 4


class SharedFrames(msgspec.Struct, array_like=True, frozen=True):
    """What a decoder process needs to map the memory: the index of its device, and the handle."""

    index: int
    memory: bytes
    nbytes: int
    offset: int
    event: bytes


class DeviceRoom:
    """Memory for the frames of one video; it is freed when this object and all tensors of it are dropped.

    Attributes:
        start: offset in the memory of all frames.
        nbytes: size in bytes.
    """

    def __init__(self, driver: Driver, index: int, block: torch.Tensor, start: int, nbytes: int) -> None:
        self._driver, self._index, self._block = driver, index, block  # kept after the service is closed
        self.start, self.nbytes = start, nbytes

    def tensor(self) -> torch.Tensor:
        """Return all of it, as bytes; the tensor, and any view of it, keeps the room.

        Use it on the stream that is current now: when the last view is dropped, that stream is waited for before the
        room is given to another video.
        """
        mapping = self._driver.own(self._index, self._block, self._driver.record(self._index), [self])
        return mapping.block[self.start : self.start + self.nbytes]


class DeviceFrames(FrameRooms):
    """Allocates rooms for frames in one block of a device's memory; see `FrameRooms`.

    Args:
        index: of the device.
        max_bytes: most bytes of all rooms together; the block has a little more, to measure links.
        on_return: called when a room was dropped; must not block.
        driver: calls that use the device.

    Raises:
        MemoryError: the device has too little memory, or its allocator makes memory that cannot be shared.
    """

    def __init__(
        self,
        index: int,
        max_bytes: int,
        on_return: Callable[[], None],
        driver: Driver | None = None,
        clock: Clock = monotonic_seconds,
    ) -> None:
        from vllm_omni_sched.connectors.cuda_ipc.driver import TorchCuda
        from vllm_omni_sched.connectors.cuda_ipc.share import ShareReason

        addresses = -(-max_bytes // BLOCK) * BLOCK
        super().__init__(max_bytes, addresses, "device_bytes", clock)
        self._index, self._wake, self._driver = index, on_return, driver or TorchCuda()
        if (obstacle := self._driver.obstacle()) is not None:
            raise MemoryError(f"memory of the device cannot be shared: {obstacle.value}")
        self._block: torch.Tensor | None = self._driver.allocate(index, addresses + SCRATCH_BYTES)
        try:
            exported = self._driver.export(self._block)
        except RuntimeError as error:
            raise MemoryError(f"memory of the device cannot be shared: {error}") from error
        if isinstance(exported, ShareReason):
            raise MemoryError(f"memory of the device cannot be shared: {exported.value}")
        self._exported = exported

    @property
    def shared(self) -> bytes:
        """Return what decoder processes need, for `DeviceFramesView`."""
        found = self._exported
        return msgspec.msgpack.encode(
            SharedFrames(self._index, found.memory, found.nbytes, found.offset, found.event),
        )

    def allocate(self, nbytes: int, wait: Callable[[], float], order: tuple[float, ...] = ()) -> DeviceRoom:
        """Return a room of ``nbytes``, as soon as there is one.

        Args:
            wait: returns the seconds that are left to wait.
            order: order among waiting callers; the least gets room first, equal ones as they came.

        Raises:
            VideoDeadlineError: other videos held the memory until the deadline.
            DecoderError: the memory is closed.
        """
        with self._changed:
            start = self._allocate(nbytes, wait, order)
            assert self._block is not None  # not closed
            room = DeviceRoom(self._driver, self._index, self._block, start, nbytes)
            weakref.finalize(room, return_room, self._returned, room.start, self._wake).atexit = False
            return room

    def _free_returned(self) -> None:
        while self._returned:
            self._extents.free(self._returned.popleft())

    def _release(self) -> None:
        # in this order: torch would keep a block that is freed while it is exported, until its next housekeeping
        self._driver.unexport(self._exported)
        self._block = None


class DeviceFramesView:
    """The memory of all frames in a decoder process.

    Args:
        shared: `DeviceFrames.shared` of its owner.

    Raises:
        RuntimeError, OSError: the driver refuses.
        ValueError: the data is no handle.
    """

    def __init__(self, shared: bytes, driver: Driver | None = None) -> None:
        from vllm_omni_sched.connectors.cuda_ipc.driver import Exported, TorchCuda

        found = msgspec.msgpack.decode(shared, type=SharedFrames)
        exported = Exported(found.memory, found.nbytes, found.offset, found.event, (b"", 0))
        self._mapping = (driver or TorchCuda()).map(found.index, exported, [])

    def room(self, start: int, nbytes: int) -> torch.Tensor:
        """Return a range of the memory, shape (nbytes,), uint8."""
        return self._mapping.block[start : start + nbytes]

    def link_bytes_per_second(self, source: torch.Tensor, finish: Callable[[], None], clock: Clock) -> float:
        """Measure how fast memory of this process's device is copied into the memory of all frames.

        Args:
            source: `SCRATCH_BYTES` of that device, uint8.
            finish: waits for the device.
        """
        target = self._mapping.block[-SCRATCH_BYTES:]
        target.copy_(source)  # the first copy also sets up access to the other device
        finish()
        began = clock()
        for _ in range(_MEASURED_COPIES):
            target.copy_(source, non_blocking=True)
        finish()
        return _MEASURED_COPIES * SCRATCH_BYTES / max(clock() - began, 1e-9)

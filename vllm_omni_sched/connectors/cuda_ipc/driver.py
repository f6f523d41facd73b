"""Calls that use a device, so that all other code is independent of it."""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

from vllm_omni_sched.connectors.cuda_ipc.share import ShareReason

NO_COUNTER = b"/vllm-omni-sched-none"
"""Name of a file of reference counts that does not exist, so that torch counts nothing in the receiver."""


class Exported(NamedTuple):
    """A block that other processes may map. ``counter`` stays here: where torch counts who uses it."""

    memory: bytes
    nbytes: int
    offset: int
    event: bytes  # empty: the device had finished
    counter: tuple[bytes, int]


class Mapping(NamedTuple):
    """A mapped block, shape (nbytes,), uint8. Call ``finished`` when the device is done with it."""

    block: torch.Tensor
    finished: Callable[[], None]


class Driver(ABC):
    """Memory and events of the devices of this process; devices by their index."""

    @abstractmethod
    def uuids(self) -> list[str]:
        """Return the UUIDs of the devices, by index; empty if this process uses none. Does not initialise a device."""

    @abstractmethod
    def index_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of a tensor's device; None if it is on the host."""

    @abstractmethod
    def obstacle(self) -> ShareReason | None:
        """Return why memory cannot be exported, as far as settings tell; None if it may."""

    @abstractmethod
    def allocate(self, index: int, nbytes: int) -> torch.Tensor:
        """Allocate a block, shape (nbytes,), uint8.

        Raises:
            MemoryError: not enough memory is free.
        """

    @abstractmethod
    def export(self, block: torch.Tensor) -> Exported | ShareReason:
        """Export a block for other processes, and record an event behind the work of the current stream.

        Raises:
            RuntimeError: the driver refuses.
        """

    @abstractmethod
    def unexport(self, exported: Exported) -> None:
        """End the export of a block that no process maps any more; called once."""

    @abstractmethod
    def map(self, index: int, exported: Exported, keep: list[Any]) -> Mapping:
        """Map a block of another process; the current stream waits for its event.

        Args:
            keep: emptied once the block is unmapped, for which it waits for that stream, unless it was ``finished``.

        Raises:
            RuntimeError, OSError: the driver refuses.
        """

    @abstractmethod
    def own(self, index: int, block: torch.Tensor, event: Any, keep: list[Any]) -> Mapping:
        """Return a block of this process, which cannot be mapped here; the current stream waits for its event.

        Args:
            keep: emptied once no view of that mapping is left, as in `map`.
        """

    @abstractmethod
    def record(self, index: int) -> Any:
        """Return an event behind the work of the current stream, with ``query()``."""

    @abstractmethod
    def collect(self) -> None:
        """Do housekeeping; called from time to time."""


class TorchCuda(Driver):
    """Driver of CUDA through torch.

    `UntypedStorage._share_cuda_` gives the IPC handle of the allocation a block lies in, and of an event that it
    records on the current stream. It uses 1000 events at most, and waits for the stream beyond that: blocks that wait
    to be got are bounded, so neither happens. It counts the receivers of a block in a file, starting with one, and
    keeps a block in limbo until the count is zero: for ever, where a receiver was killed. So receivers count nowhere
    (`NO_COUNTER`), and the sender counts down itself when the arena says that the message is done with.
    """

    def uuids(self) -> list[str]:
        import torch

        if not torch.cuda.is_initialized():
            return []
        count = torch.cuda.device_count()
        return [str(torch.cuda.get_device_properties(index).uuid) for index in range(count)]

    def index_of(self, tensor: torch.Tensor) -> int | None:
        return tensor.device.index if tensor.device.type == "cuda" else None

    def obstacle(self) -> ShareReason | None:
        import torch

        settings = "".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
        expandable = "expandable_segments:true" in settings.lower().replace(" ", "")
        if expandable or torch.cuda.get_allocator_backend() != "native":
            return ShareReason.ALLOCATOR
        return None

    def allocate(self, index: int, nbytes: int) -> torch.Tensor:
        import torch

        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{index}")
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

    def export(self, block: torch.Tensor) -> Exported | ShareReason:
        (_, memory, nbytes, offset, counter, count_at, event, ordered) = block.untyped_storage()._share_cuda_()
        exported = Exported(memory, nbytes, offset, event if ordered else b"", (counter, count_at))
        if memory[1:2] == b"e":  # torch's version and kind come before the handle: "c", or "e" of expandable segments
            self.unexport(exported)
            return ShareReason.ALLOCATOR
        return exported

    def unexport(self, exported: Exported) -> None:
        import torch

        torch.UntypedStorage._release_ipc_counter_cuda(*exported.counter)

    def map(self, index: int, exported: Exported, keep: list[Any]) -> Mapping:
        import torch

        with torch.cuda.device(index):
            stream = torch.cuda.current_stream()
            if exported.event:  # not by _new_shared_cuda, which never destroys the event that it opens
                torch.cuda.Event.from_ipc_handle(torch.device("cuda", index), exported.event).wait(stream)
            where = (exported.memory, exported.nbytes, exported.offset)
            storage = torch.UntypedStorage._new_shared_cuda(index, *where, NO_COUNTER, 0, b"", False)
            return _looked_at(index, storage, stream, keep)

    def own(self, index: int, block: torch.Tensor, event: Any, keep: list[Any]) -> Mapping:
        import torch

        with torch.cuda.device(index):
            stream = torch.cuda.current_stream()
            event.wait(stream)
            return _looked_at(index, block.untyped_storage(), stream, keep)

    def record(self, index: int) -> Any:
        import torch

        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(index))
        return event

    def collect(self) -> None:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.ipc_collect()


@lru_cache
def _idle_stream(index: int) -> Any:
    """Return a stream on which no work ever runs: torch waits for the current stream when it unmaps."""
    import torch

    return torch.cuda.Stream(device=index)


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    if (alive := method()) is not None:
        alive()


def _looked_at(index: int, storage: Any, stream: Any, keep: list[Any]) -> Mapping:
    import torch

    mapped = _Mapped(storage, stream, _idle_stream(index), keep)
    finish = weakref.WeakMethod(mapped.finish)
    return Mapping(torch.as_tensor(mapped, device=f"cuda:{index}"), lambda: _call(finish))


class _Mapped:
    """Keeps a block mapped while tensors of it live: `torch.as_tensor` keeps the owner of ``__cuda_array_interface__``.

    When the last view is dropped, the block is unmapped before ``keep`` is emptied.
    """

    def __init__(self, storage: Any, stream: Any, idle: Any, keep: list[Any]) -> None:
        self._storage, self._stream, self._idle, self._keep = storage, stream, idle, keep
        self.__cuda_array_interface__ = {
            "shape": (storage.nbytes(),),
            "typestr": "|u1",
            "data": (storage.data_ptr(), False),
            "version": 2,
        }

    def finish(self) -> None:
        """Record that the device has finished with the block, so that unmapping need not wait."""
        self._stream = None

    def __del__(self) -> None:
        import torch

        if self._stream is not None:
            self._stream.synchronize()
        with torch.cuda.stream(self._idle):
            self._storage = None
        self._keep.clear()

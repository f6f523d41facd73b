"""CUDA IPC: handles of device memory, with which a receiver maps the memory of the sender."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from vllm_omni_sched.config.errors import CorruptMessageError, DeviceLostError
from vllm_omni_sched.connectors.cuda_ipc.driver import Driver, Exported, Mapping, TorchCuda
from vllm_omni_sched.connectors.cuda_ipc.share import ShareReason

if TYPE_CHECKING:
    import torch


class Handle(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Handle of one block: the process that shares it, its number there, the device, and the data to map it.

    ``memory`` is torch's: the IPC handle of the allocation; the block lies ``offset`` bytes in.
    """

    token: str
    number: int
    device: str
    memory: bytes
    nbytes: int
    offset: int
    event: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Handle).decode


def packed(handle: Handle) -> bytes:
    """Encode a handle."""
    return _encode(handle)


def unpacked(data: bytes) -> Handle:
    """Decode a handle.

    Raises:
        CorruptMessageError: the data is not a handle.
    """
    try:
        handle = _decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise CorruptMessageError(f"the handle of a device tensor cannot be read: {error}") from error
    if handle.nbytes < 0 or handle.offset < 0:
        raise CorruptMessageError(f"invalid handle of a device tensor: {handle.nbytes} bytes at offset {handle.offset}")
    return handle


class _Own(NamedTuple):
    """Holds a shared block, and an event recorded after the copy into it."""

    device: int  # its index
    block: torch.Tensor
    copied: Any


_here: dict[tuple[str, int], _Own] = {}
"""Blocks that this process shares, by token and number; CUDA cannot open a handle in the process that made it."""
_inherited: list[Any] = []
"""Objects that a forked child must not free."""


class CudaShare:
    """Makes a block of device memory available in another process, by CUDA IPC; a handle goes with the message.

    1. A block that was shared is what it was when `share` was called, for work that comes later on the stream that is
       current in `open`. Neither call waits for the device.
    2. It stays so until `release`, which is called once, by the process that shared it.
    3. An opened block is good as long as ``keep`` is held, and nothing of it is used once ``keep`` is let go.

    The sender records an event behind the copy into a block; the receiver's stream waits for it. A copy that the
    receiver makes is followed by an event, too: only when the device has passed it does the sender get its block back.
    A view gives it back when its last tensor goes, after the stream that it was opened on has finished.

    Args:
        token: names this process as a sender.
        is_alive: whether the sender of a token lives.
    """

    def __init__(self, token: Callable[[], str], is_alive: Callable[[str], bool], driver: Driver | None = None) -> None:
        self._token, self._is_alive, self._driver = token, is_alive, driver or TorchCuda()
        self._numbers = itertools.count(1)
        self._exported: dict[tuple[str, int], Exported] = {}
        self._uuids: list[str] = []
        self._unopenable: set[str] = set()  # devices that the driver refused to open
        self._openable: frozenset[str] = frozenset()  # all other devices; queried until there is one
        self._released = False
        self._copying: deque[tuple[Any, Mapping]] = deque()  # an event, and the mapping to release after it
        self._lock = threading.Lock()  # of `_copying`; never held while mappings are released

    def devices(self) -> frozenset[str]:
        """Return the devices whose memory this process can open, as far as known, by names common to the host."""
        if not self._openable:
            self._openable = frozenset(self._names()) - self._unopenable
        return self._openable

    def device_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of a tensor's device; None for tensors that it does not share."""
        index = self._driver.index_of(tensor)
        return self._names()[index] if index is not None else None

    def obstacle(self) -> ShareReason | None:
        """Return why nothing can be shared from here, as far as known; None if it can."""
        return self._driver.obstacle()

    def allocate(self, like: torch.Tensor, nbytes: int) -> torch.Tensor | ShareReason:
        """Allocate a block, shape (nbytes,), uint8, on the device of ``like``; return a reason if that fails."""
        index = self._driver.index_of(like)
        try:
            return self._driver.allocate(index, nbytes) if index is not None else ShareReason.NO_DEVICE
        except MemoryError:
            return ShareReason.NO_MEMORY

    def share(self, block: torch.Tensor) -> bytes | ShareReason:
        """Return a handle of a block from `allocate`, with all work on it that is queued on the current stream."""
        device, index = self.device_of(block), self._driver.index_of(block)
        if device is None or index is None:
            return ShareReason.NO_DEVICE
        try:
            token, copied = self._token(), self._driver.record(index)
            exported = self._driver.export(block)
        except (RuntimeError, OSError):
            return ShareReason.REFUSED
        if isinstance(exported, ShareReason):
            return exported
        name = (token, next(self._numbers))
        self._exported[name], _here[name] = exported, _Own(index, block, copied)
        return packed(Handle(*name, device, exported.memory, exported.nbytes, exported.offset, exported.event))

    def open(self, handle: bytes, keep: Any, copy: bool) -> torch.Tensor:
        """Open the block of a handle, shape (nbytes,), uint8, in order with the current stream.

        Args:
            keep: held until nothing looks at the sender's memory any more: by the block itself, or by `collect`.
            copy: the block is a copy on the device.

        Raises:
            CorruptMessageError: it is no handle.
            DeviceLostError: its sender is dead, or it cannot be opened here.
        """
        said = unpacked(handle)
        own = _here.get((said.token, said.number))
        if own is not None:
            index, mapping = own.device, self._driver.own(*own, [keep])
        else:
            index, mapping = self._mapped(said, keep)
        if not copy:
            return mapping.block
        copied = mapping.block.clone()
        with self._lock:
            self._copying.append((self._driver.record(index), mapping))
        del mapping
        self._let_go()
        return copied

    def release(self, handle: bytes) -> None:
        """Free a block that no receiver uses, or will use."""
        said = unpacked(handle)
        name = (said.token, said.number)
        exported = self._exported.pop(name, None)
        if exported is not None:
            self._released = True
            self._driver.unexport(exported)
            del _here[name]

    def collect(self) -> int:
        """Release what the device has finished with, at little cost; return how many blocks."""
        if self._released:
            self._released = False
            self._driver.collect()
        return self._let_go()

    def abandon(self) -> None:
        """Forget everything without freeing it, in a forked child, to which none of it belongs."""
        _inherited.extend((dict(_here), list(self._copying)))
        _here.clear()
        self._exported.clear()
        self._copying, self._lock = deque(), threading.Lock()

    def _mapped(self, said: Handle, keep: Any) -> tuple[int, Mapping]:
        """Map a block of another process, and return it with the index of its device."""
        names = self._names()
        if said.device not in names:
            raise DeviceLostError(
                f"a tensor is on device {said.device}, and this process can open memory of {names or 'none'}; let "
                "the stages of this edge see the same devices, or set the connector's option `cuda_ipc` to null"
            )
        if not self._is_alive(said.token):
            raise DeviceLostError("the sender that held a tensor on its device has ended; the tensor is lost")
        index = names.index(said.device)
        exported = Exported(said.memory, said.nbytes, said.offset, said.event, (b"", 0))
        try:
            return index, self._driver.map(index, exported, [keep])
        except (RuntimeError, OSError, ValueError, TypeError) as error:
            if not self._is_alive(said.token):
                raise DeviceLostError(
                    "the sender that held a tensor on its device ended while it was received"
                ) from error
            self._unopenable.add(said.device)
            self._openable = frozenset()
            raise DeviceLostError(
                f"the memory of another process on device {said.device} cannot be opened: {error}; processes in "
                "containers need one IPC namespace (`docker run --ipc=host`), or the option `cuda_ipc` null"
            ) from error

    def _let_go(self) -> int:
        """Release blocks whose copies are finished; return how many."""
        gone = 0
        while True:
            with self._lock:
                if not self._copying or not self._copying[0][0].query():
                    return gone
                _, mapping = self._copying.popleft()
            mapping.finished()
            del mapping
            gone += 1

    def _names(self) -> list[str]:
        self._uuids = self._uuids or self._driver.uuids()
        return self._uuids

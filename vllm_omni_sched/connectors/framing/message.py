"""A payload taken apart, before it is written."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_omni_sched.connectors.edge import Edge, new_name
from vllm_omni_sched.connectors.framing.layout import (
    ALIGNMENT,
    CHECKED,
    CHECKSUM,
    HEAD,
    LARGE,
    MAGIC,
    PAGE,
    PLACE,
    VERSION,
    Hook,
)
from vllm_omni_sched.connectors.framing.values import Packer

if TYPE_CHECKING:
    from vllm_omni_sched.connectors.framing.arrival import Arrival


_packers: list[Packer] = []  # that no thread uses now: making an encoder takes longer than encoding most payloads
_memmove = ctypes.PyDLL(None).memmove  # keeps the interpreter lock: a busy thread that gets it may keep it for 5 ms
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
BRIEF = 64 << 10
"""Up to so many bytes are copied without releasing the interpreter lock: in some ten microseconds."""


class Message:
    """A payload on its way from stage to stage, not yet written anywhere.

    Attributes:
        body: msgpack of all but the buffers.
        buffers: arrays and tensors that are not in the body.
        flags: `REVIVE`, `PACKED`, `ON_DEVICE`.
        done: called by a path of this host, once, when nobody has the message and nobody will get it any more.
        nbytes: of the message when written.
        payload_bytes: of its buffers alone.
        longest: dtype and number of dimensions of its longest array; None without one.
        id: tells it from all others, where copies may meet; 0: from none.
        next_use_seconds: a hint, when its receiver is expected to want it; not sent.
    """

    def __init__(
        self, edge: Edge, key: str, body: bytes, buffers: list[Any], longest: tuple[str, int] | None = None
    ) -> None:
        self.edge, self.key, self.name = edge, key, new_name(edge, key)
        self.body, self.buffers, self.longest = body, buffers, longest
        self.flags = self.payload_bytes = self.id = 0
        self.next_use_seconds: float | None = None
        self.done: Callable[[], None] | None = None
        self._places: list[tuple[int, int]] = []
        at = HEAD.size + PLACE.size * len(buffers) + len(self.name) + len(body)
        for buffer in buffers:
            nbytes = int(buffer.nbytes)
            alignment = PAGE if nbytes >= LARGE else ALIGNMENT
            at = -(-at // alignment) * alignment
            self._places.append((at, nbytes))
            at += nbytes
            self.payload_bytes += nbytes
        self.nbytes = at

    def write_to(self, target: memoryview, address: int, generation: int = 0, checked: bool = False) -> None:
        """Write it; each buffer is copied once.

        Args:
            target: memory of at least `nbytes` bytes, format "B".
            address: of the first byte of ``target``.
            generation: what the receiver may ask for.
            checked: with a checksum of its buffers, at which the receiver looks.

        Raises:
            ValueError: ``target`` is too short.
        """
        if len(target) < self.nbytes:
            raise ValueError(f"a message of {self.nbytes} bytes does not fit into {len(target)}")
        checksum = 0
        for (at, nbytes), buffer in zip(self._places, self.buffers, strict=True):
            if nbytes:
                _copy(buffer, target, at, address + at)
                if checked:
                    checksum = zlib.crc32(target[at : at + nbytes], checksum)
        front = self._front(generation, checksum if checked else None)
        target[: len(front)] = front

    def pieces(self, generation: int = 0, checked: bool = False) -> Iterator[Any]:
        """Yield the message as bytes and arrays of bytes, for files; contiguous buffers are not copied. See
        `write_to`.
        """
        flat = [_flat(buffer) if buffer.nbytes else b"" for buffer in self.buffers]
        checksum = 0
        for buffer in flat if checked else ():
            checksum = zlib.crc32(buffer, checksum)
        yield (front := self._front(generation, checksum if checked else None))
        at = len(front)
        for (start, nbytes), buffer in zip(self._places, flat, strict=True):
            yield bytes(start - at)
            at = start + nbytes
            if nbytes:
                yield buffer
        yield bytes(self.nbytes - at)

    def _front(self, generation: int, of_buffers: int | None) -> bytes:
        name, body, places = self.name, self.body, self._places
        counts = (len(name), len(body), len(places))
        flags = self.flags if of_buffers is None else self.flags | CHECKED
        head = HEAD.pack(0, MAGIC, VERSION, flags, *counts, generation, self.nbytes, self.id, of_buffers or 0)
        table = b"".join([PLACE.pack(*place) for place in places]) if places else b""
        front = head[CHECKSUM.size :] + table + name + body
        return CHECKSUM.pack(zlib.crc32(front)) + front

    def to_buffer(self, checked: bool = False) -> bytearray:
        """Return the message in memory of its own. See `write_to`."""
        written = bytearray(self.nbytes)
        self.write_to(memoryview(written), ctypes.addressof(ctypes.c_char.from_buffer(written)), checked=checked)
        return written


def make_message(edge: Edge, key: str, payload: Any, fallback: Hook | None = None) -> Message:
    """Take a payload apart.

    Args:
        fallback: makes plain data of objects that msgspec does not know.

    Raises:
        PayloadError: something in it cannot be sent.
    """
    try:
        packer = _packers.pop()
    except IndexError:
        packer = Packer()
    body, buffers, longest = packer.pack(payload, fallback)
    _packers.append(packer)
    return Message(edge, key, body, buffers, longest)


def message_of(arrival: Arrival, edge: Edge, key: str) -> Message:
    """Return the same message to be put elsewhere; nothing is decoded, and its buffers are those of the arrival."""
    body, buffers = arrival.parts()
    message = Message(edge, key, body, buffers, ("uint8", 1) if buffers else None)
    message.flags, message.id = arrival.flags, arrival.id
    return message


def _flat(source: Any) -> Any:
    """Return an array or tensor as bytes on the host; shape (nbytes,), uint8."""
    if isinstance(source, np.ndarray):
        return np.ascontiguousarray(source).reshape(-1).view(np.uint8)
    import torch

    return source.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _copy(source: Any, target: memoryview, at: int, address: int) -> None:
    """Copy an array or tensor to byte ``at`` of ``target``, which is at ``address``."""
    if isinstance(source, np.ndarray):
        if source.flags.c_contiguous:
            _move(address, source.ctypes.data, source.nbytes)
        else:
            np.frombuffer(target, source.dtype, source.size, at).reshape(source.shape)[...] = source
        return
    if source.is_cpu and source.is_contiguous():
        _move(address, source.data_ptr(), source.nbytes)
        return
    import torch

    flat = torch.frombuffer(target, dtype=source.dtype, count=source.numel(), offset=at)
    flat.view(source.shape).copy_(source.detach())


def _move(target: int, source: int, nbytes: int) -> None:
    (_memmove if nbytes <= BRIEF else ctypes.memmove)(target, source, nbytes)

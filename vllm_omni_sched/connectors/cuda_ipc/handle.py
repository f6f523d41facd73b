"""A block of device memory as plain bytes."""

from __future__ import annotations

import msgspec

from vllm_omni_sched.errors import CorruptMessageError


class Handle(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One block: who shares it, its number there, the device, and what maps it.

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
        raise CorruptMessageError(f"a handle says that {handle.nbytes} bytes lie at {handle.offset}")
    return handle

"""Decoding of a message's body into values that are views of its buffers."""

from __future__ import annotations

import math
import struct
import sys
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from vllm_omni_sched.connectors.framing.layout import BYTES, HERE, IMAGE, NDARRAY, TENSOR, VALUE, unpacked
from vllm_omni_sched.errors import CorruptMessageError

UNREADABLE = (
    *(msgspec.DecodeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
    *(MemoryError, SyntaxError, struct.error),  # of NumPy, when it is asked for a dtype that is none
)
Place = tuple[Any, int, int]
"""A buffer: the object that holds it, its offset and its size in bytes."""


class Opener:
    """A msgpack decoder, for one message after the other: making one takes longer than most bodies do."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._decode = msgspec.msgpack.Decoder(ext_hook=self._from_extension).decode

    def open(self, body: Any, places: list[Place]) -> Any:
        """The payload.

        Raises:
            CorruptMessageError: it cannot be read.
        """
        self._places = places
        try:
            return self._decode(body)
        except CorruptMessageError:
            raise
        except UNREADABLE as error:
            raise CorruptMessageError(f"the body of a message cannot be read: {error}") from error
        finally:
            self._places = []

    def _from_extension(self, code: int, data: memoryview) -> Any:
        if code == BYTES:
            source, at, nbytes = self._places[unpacked(data)]
            return bytes(memoryview(source)[at : at + nbytes])
        which, length = VALUE.unpack_from(data)
        start = VALUE.size + length
        described = bytes(data[VALUE.size : start])
        if which == HERE:
            source, at, nbytes = bytearray(data[start:]), 0, len(data) - start
        else:
            source, at, nbytes = self._places[which]
        if code == TENSOR:
            dtype, shape, expected = _tensor_like(described)
            if nbytes != expected:
                raise CorruptMessageError(f"a message says that {nbytes} bytes have the shape {shape}")
            torch = sys.modules["torch"]
            if isinstance(source, torch.Tensor):  # a block on a device
                return source[at : at + nbytes].view(dtype).view(shape)
            if not nbytes:
                return torch.empty(shape, dtype=dtype)
            flat = torch.frombuffer(source, dtype=dtype, count=nbytes // dtype.itemsize, offset=at)
            return flat if len(shape) == 1 else flat.view(*shape) if shape else flat.as_strided((), ())
        kind, shape = unpacked(described)
        if code == NDARRAY:
            dtype = np.dtype(kind)
            _check(shape, dtype.itemsize, nbytes)
            return np.frombuffer(source, dtype, nbytes // (dtype.itemsize or 1), at).reshape(shape)
        if code == IMAGE:
            from PIL import Image

            return Image.frombuffer(kind, tuple(shape), bytes(memoryview(source)[at : at + nbytes]), "raw", kind, 0, 1)
        raise CorruptMessageError(f"a message holds an extension of unknown kind {code}")


@lru_cache(maxsize=4096)
def _tensor_like(described: bytes) -> tuple[Any, list[int], int]:
    """Return dtype, shape and size in bytes of all tensors with this description."""
    import torch

    name, shape = unpacked(described)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptMessageError(f"a message holds a tensor of unknown dtype {name!r}")
    if min(shape, default=0) < 0:
        raise CorruptMessageError(f"a message holds a tensor of shape {shape}")
    return dtype, shape, math.prod(shape) * dtype.itemsize


def _check(shape: list[int], itemsize: int, nbytes: int) -> None:
    if min(shape, default=0) < 0 or math.prod(shape) * itemsize != nbytes:
        raise CorruptMessageError(f"a message says that {nbytes} bytes have the shape {shape}")

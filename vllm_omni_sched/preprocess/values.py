"""How values are laid into shared memory, and taken out of it, without pickle.

A value becomes a small tree, which msgpack encodes, and the buffers that it refers to, which are written one after the
other into a memory file. Tensors and arrays are not copied when they are taken out: they look into the file.

The reader trusts nothing: types, sizes and offsets are checked, and a file is read only once it is sealed, so that its
writer can neither change nor truncate it afterwards.
"""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_omni_sched.config.errors import UnsupportedValueError

_ALIGN = 64
_DEPTH = 32
_MOST_NODES = 1 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    )
}
_KINDS = "biufc"  # of arrays: numbers, never objects


@dataclass(frozen=True)
class Picture:
    """A picture as it was received, which the reader decodes.

    ``mode``, ``settings``: arguments of vLLM's decoder of pictures; ``mode`` is that of the decoded picture, too.
    ``size``, ``converted``: what the sender expects of it: width and height, and whether its mode had to be changed.
    """

    data: bytes | memoryview
    mode: str
    settings: dict[str, Any]
    size: tuple[int, int]
    converted: bool


@dataclass(frozen=True)
class Pixels:
    """The pixels of a picture: ``array`` has the shape (height, width, channels), or (height, width)."""

    mode: str
    array: np.ndarray[Any, Any]


@dataclass
class Encoded:
    """A value in parts: the tree, and the buffers in the order of their offsets."""

    tree: Any = None
    buffers: list[memoryview] = field(default_factory=list)
    nbytes: int = 0

    def add(self, data: Any) -> list[int]:
        """Add a buffer, and return its offset and size."""
        view = memoryview(data).cast("B")
        padding = -self.nbytes % _ALIGN
        if padding:
            self.buffers.append(memoryview(bytes(padding)))
        start = self.nbytes + padding
        self.buffers.append(view)
        self.nbytes = start + view.nbytes
        return [start, view.nbytes]


def encode(value: Any) -> Encoded:
    """Return a value in parts; buffers are not copied, if they are contiguous.

    Raises:
        UnsupportedValueError: it contains something of a type that is not sent, or it is nested too deeply.
    """
    found = Encoded()
    found.tree = _encode(value, found, _DEPTH)
    return found


def _encode(value: Any, out: Encoded, depth: int) -> Any:
    if not depth:
        raise UnsupportedValueError("a value is nested too deeply, or contains itself")
    if value is None or isinstance(value, (bool, str)):
        return value
    kind = type(value)
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else ["i", str(value)]
    if kind is float:
        return value
    if kind in (bytes, bytearray, memoryview):
        return ["b", *out.add(value)]
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, out)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in _KINDS:
            raise UnsupportedValueError(f"an array of {value.dtype} is not sent to another process")
        array = np.ascontiguousarray(value)
        data = array.reshape(-1).view(np.uint8) if array.size else b""
        return ["n" if isinstance(value, np.generic) else "a", value.dtype.str, list(value.shape), *out.add(data)]
    if kind in (list, tuple):
        return ["l" if kind is list else "t", [_encode(one, out, depth - 1) for one in value]]
    if isinstance(value, Picture):
        expected = [value.mode, *value.size, value.converted]
        return ["p", expected, _encode(value.settings, out, depth - 1), *out.add(value.data)]
    if isinstance(value, Pixels):
        return ["x", value.mode, _encode(value.array, out, depth - 1)]
    if kind is dict and all(type(key) is str for key in value):
        return ["d", [[key, _encode(one, out, depth - 1)] for key, one in value.items()]]
    raise UnsupportedValueError(f"a value of type {kind.__module__}.{kind.__qualname__} is not sent to another process")


def _encode_tensor(value: torch.Tensor, out: Encoded) -> Any:
    name = str(value.dtype).removeprefix("torch.")
    if name not in _DTYPES or value.layout is not torch.strided or value.device.type != "cpu":
        raise UnsupportedValueError(
            f"a tensor of {value.dtype} on {value.device} with layout {value.layout} is not sent to another process"
        )
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return ["T", name, list(value.shape), *out.add(data)]


def decode(tree: Any, memory: memoryview) -> Any:
    """Return the value of a tree, whose tensors and arrays look into ``memory``.

    Raises:
        ValueError: the tree is not one that `encode` makes for a memory of this size.
    """
    return _Decoder(memory).value(tree, _DEPTH)


class _NotAValue(ValueError):
    """What came from another process is not a value."""


class _Decoder:
    def __init__(self, memory: memoryview) -> None:
        self._memory, self._nodes = memory, 0

    def value(self, node: Any, depth: int) -> Any:
        self._nodes += 1
        if not depth or self._nodes > _MOST_NODES:
            raise _NotAValue("a value from another process is too large, or nested too deeply")
        if node is None or isinstance(node, (bool, int, float, str)):
            return node
        try:
            kind, *rest = node
            return self._node(depth - 1, kind, *rest)
        except _NotAValue:
            raise
        except (TypeError, KeyError, ValueError, IndexError, OverflowError) as error:
            raise _NotAValue(f"a malformed value came from another process: {error}") from None

    def _node(self, depth: int, kind: Any, *rest: Any) -> Any:
        if kind == "T":
            name, shape, *where = rest
            dtype = _DTYPES[name]
            data = self._numbers(shape, dtype.itemsize, where)
            if not data.nbytes:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)
        if kind in ("a", "n"):
            name, shape, *where = rest
            dtype = np.dtype(_text(name))
            if dtype.kind not in _KINDS or dtype.shape or dtype.names:
                raise _NotAValue(f"an array of {dtype} came from another process")
            array = np.frombuffer(self._numbers(shape, dtype.itemsize, where), dtype).reshape(shape)
            return array[()].copy() if kind == "n" else array
        if kind in ("l", "t"):
            found = [self.value(one, depth) for one in _items(rest[0])]
            return found if kind == "l" else tuple(found)
        if kind == "d":
            return {_text(key): self.value(one, depth) for key, one in _items(rest[0])}
        if kind == "b":
            return bytes(self._bytes(*rest))
        if kind == "i":
            return int(_text(rest[0])[:100])
        if kind == "p":
            (mode, width, height, converted), settings, *where = rest
            size = (int(width), int(height))
            return Picture(self._bytes(*where), _text(mode), self.value(settings, depth), size, bool(converted))
        if kind == "x":
            return Pixels(_text(rest[0]), self.value(rest[1], depth))
        raise _NotAValue(f"a value of unknown kind {kind!r} came from another process")

    def _bytes(self, start: Any, nbytes: Any) -> memoryview:
        if type(start) is not int or type(nbytes) is not int or not 0 <= start <= start + nbytes <= len(self._memory):
            raise _NotAValue("a value from another process lies outside its memory")
        return self._memory[start : start + nbytes]

    def _numbers(self, shape: Any, itemsize: int, where: Sequence[Any]) -> memoryview:
        if type(shape) is not list or not all(type(one) is int and one >= 0 for one in shape) or len(shape) > 64:
            raise _NotAValue(f"a value from another process has the shape {shape!r}")
        data = self._bytes(*where)
        if data.nbytes != math.prod(shape) * itemsize:
            raise _NotAValue("a value from another process does not have the bytes of its shape")
        return data


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _NotAValue(f"a value from another process has {value!r} in place of text")
    return value


def _items(value: Any) -> list[Any]:
    if type(value) is not list:
        raise _NotAValue("a value from another process has no list of items")
    return value


def sealed_file(encoded: Encoded) -> int:
    """Return the descriptor of a new memory file with the buffers, which nobody can change any more.

    Raises:
        OSError: no memory or no descriptor is left, or the file would be larger than this process may write.
    """
    fd = os.memfd_create("omni-sched-preprocess", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for buffer in encoded.buffers:
            left = buffer
            while left:
                left = left[os.write(fd, left) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_sealed(fd: int, most: int) -> memoryview:
    """Return the content of a sealed file, writable as a private copy; the file stays as long as a value of it is used.

    Raises:
        ValueError: the file is not sealed, or has more than ``most`` bytes.
        OSError: it cannot be mapped.
    """
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        sealed = 0
    if sealed & _SEALS != _SEALS:
        raise ValueError("the memory file of a value from another process is not sealed")
    nbytes = os.fstat(fd).st_size
    if nbytes > most:
        raise ValueError(f"a value from another process has {nbytes} bytes, but only {most} are allowed")
    if not nbytes:
        return memoryview(b"")
    try:  # unlike Python's mmap, this keeps no descriptor, and results may live long
        whole = torch.from_file(f"/proc/self/fd/{fd}", shared=False, size=nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"a value from another process cannot be mapped: {error}") from None
    return memoryview(whole.numpy())

"""Digests of the data of multimodal items, made by this engine.

vLLM names an item, and its encoding, by ``identifier``: its own hash of what the client sent, or a ``uuid`` that the
client chose, or the id of the request where all caches are off. One name may thus stand for several items. Whatever
keeps an encoding outside of vLLM's encoder cache therefore goes by these digests.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from blake3 import blake3

_LENGTH = struct.Struct("<Q")


class Contents:
    """Returns the digest of the data that the encoder gets for an item.

    1. Items have one digest if their modality and all of their data are equal: names, dtypes, shapes and bytes.
    2. The data of an item is hashed once, as long as vLLM keeps the same object.
    3. An item whose data this process cannot read has no digest: it was sent without data, or its data lies in shared
       memory of the workers, or on a device.

    Args:
        algorithm: vLLM's ``mm_hasher_algorithm``; SHA-256 is taken unless it is ``blake3``.
    """

    def __init__(self, algorithm: str = "blake3") -> None:
        self._hasher: Callable[[], Any] = blake3 if algorithm == "blake3" else hashlib.sha256
        self._known: dict[int, tuple[weakref.ref[Any], str]] = {}  # id of the data -> the data, and its digest

    def of(self, feature: Any) -> str | None:
        """Return the digest of an item; None if there is none (rule 3)."""
        data = feature.data
        if data is None:
            return None
        place = id(data)
        known = self._known.get(place)
        if known is not None and known[0]() is data:
            return known[1]
        digest = self._digest(feature.modality, data)
        if digest is not None:
            self._known[place] = weakref.ref(data, lambda _: self._known.pop(place, None)), digest
        return digest

    def same(self, one: Any, other: Any) -> bool:
        """Return whether two items of one identifier are known to have the same data, which is compared if need be."""
        if one.data is other.data and one.data is not None:
            return True
        digest = self.of(one)
        return digest is not None and digest == self.of(other)

    def _digest(self, modality: str, data: Mapping[str, Any]) -> str | None:
        if "address" in data:  # of shared memory
            return None
        hasher = self._hasher()
        try:
            for part in parts([modality, *((name, elem.data) for name, elem in sorted(data.items()))]):
                hasher.update(part)
        except _UnreadableError:
            return None
        return str(hasher.hexdigest())


def contents_of(vllm_config: Any) -> Contents:
    """Return the digests of an engine's items, by the hash that vLLM is told to take."""
    multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
    return Contents(getattr(multimodal, "mm_hasher_algorithm", "blake3"))


class _UnreadableError(Exception):
    """Data that is not in the memory of this process, or of an unknown type."""


def parts(value: Any) -> Iterator[bytes | memoryview]:
    """Yield bytes that belong to this value alone, whatever follows: each part has its kind and its length in front."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise _UnreadableError
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        yield from _framed(b"t", f"{value.dtype} {tuple(value.shape)}".encode())
        yield from _framed(b"b", content)
    elif isinstance(value, list | tuple):
        yield b"l" + _LENGTH.pack(len(value))
        for one in value:
            yield from parts(one)
    elif value is None or isinstance(value, bool | int | float | str):
        yield from _framed(b"v", repr(value).encode("utf-8", "surrogatepass"))
    else:
        raise _UnreadableError


def _framed(kind: bytes, content: bytes | memoryview) -> Iterator[bytes | memoryview]:
    yield kind + _LENGTH.pack(len(content))
    yield content

"""Compute a key for the content of a piece of work: equal content has an equal key in every process."""

import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Protocol


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


def content_key(parts: Mapping[str, Any]) -> str:
    """Return the digest of nested mappings, lists, strings, numbers, bytes and None: BLAKE2b (RFC 7693), 256 bits, hex.

    1. Every value is hashed with its type and its length: 1, 1.0, "1", b"1" and True all differ, and no two
       adjacent values can be confused.
    2. The order of a mapping's keys does not matter. A tuple equals a list. 0.0 and -0.0 differ.
    3. Users choose the content, and equal keys share an output: hence a cryptographic digest of full length.

    Raises:
        TypeError: a value has another type, or a mapping's key is not a string; the message names the path.
    """
    digest = blake2b(digest_size=32)
    _add(digest, parts, "parts")
    return digest.hexdigest()


def _add(digest: _Hash, value: Any, path: str) -> None:
    match value:
        case None:
            digest.update(b"N")
        case bool():  # before int: True is one
            digest.update(b"T" if value else b"F")
        case int():
            _add_bytes(digest, b"i", b"%d" % value)
        case float():
            digest.update(b"f" + struct.pack(">d", value))
        case str():
            _add_bytes(digest, b"s", value.encode("utf-8", "surrogatepass"))
        case bytes():
            _add_bytes(digest, b"b", value)
        case list() | tuple():
            digest.update(b"l%d:" % len(value))
            for at, one in enumerate(value):
                _add(digest, one, f"{path}[{at}]")
        case Mapping():
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"{path}: the keys of a mapping must be strings, got {key!r}")
            digest.update(b"d%d:" % len(value))
            for key in sorted(value):
                _add(digest, key, path)
                _add(digest, value[key], f"{path}[{key!r}]")
        case _:
            raise TypeError(f"{path} is of type {type(value).__qualname__}, not supported; pass bytes or plain values")


def _add_bytes(digest: _Hash, tag: bytes, data: bytes) -> None:
    digest.update(tag + b"%d:" % len(data))
    digest.update(data)

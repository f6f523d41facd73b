"""Keys of messages in the store."""

from __future__ import annotations

import hashlib
import struct
import zlib

_LINK = struct.Struct("<QI")
LINK_BYTES = _LINK.size


class Names:
    """Keys of one namespace.

    1. A message is stored under the *plain* key of its name, which its receiver can derive.
    2. After its sender has taken a message back, a key is not used again while a receiver may still be reading it. The
       next message of that name is stored under a key *of its own*, and a *link* contains that key.

    A message that could be removed after it was read was therefore complete while it was read.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def plain(self, name: bytes) -> str:
        return f"{self._namespace}/{hashlib.blake2b(name, digest_size=16).hexdigest()}"

    def beacon(self, token: int, life: int) -> str:
        """Return the key of a sender's beacon, which shows whether the master has lost data since."""
        return f"{self._namespace}/sender/{token:08x}/{life}"


def own_key(plain: str, generation: int) -> str:
    """Return the key of one message alone."""
    return f"{plain}/{generation:016x}"


def link_key(plain: str) -> str:
    """Return the key of a name's link."""
    return f"{plain}/link"


def make_link(generation: int) -> bytes:
    """Return the content of a link."""
    return _LINK.pack(generation, zlib.crc32(generation.to_bytes(8, "little")))


def read_link(data: bytes) -> int | None:
    """Return the generation to which a link leads; None if it is being written."""
    if len(data) != LINK_BYTES:
        return None
    generation, checksum = _LINK.unpack(data)
    return int(generation) if zlib.crc32(generation.to_bytes(8, "little")) == checksum else None

"""Under which keys messages lie in the store."""

from __future__ import annotations

import hashlib
import struct
import zlib

_LINK = struct.Struct("<QI")
LINK_BYTES = _LINK.size


class Names:
    """Keys of one namespace.

    1. A message lies under the *plain* key of its name, which its receiver can work out.
    2. A key from which its sender has taken a message back is not used again while somebody may still be reading
       there. The next message of that name lies under a key *of its own*, and a *link* says which.

    So what has been removed under its key after it was read, was whole while it was read.
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def plain(self, name: bytes) -> str:
        return f"{self._namespace}/{hashlib.blake2b(name, digest_size=16).hexdigest()}"

    def beacon(self, token: int, life: int) -> str:
        """What a sender puts to see whether the master has forgotten it since."""
        return f"{self._namespace}/sender/{token:08x}/{life}"


def own_key(plain: str, generation: int) -> str:
    """Key of one message alone."""
    return f"{plain}/{generation:016x}"


def link_key(plain: str) -> str:
    """Where the link lies."""
    return f"{plain}/link"


def make_link(generation: int) -> bytes:
    """What a link says."""
    return _LINK.pack(generation, zlib.crc32(generation.to_bytes(8, "little")))


def read_link(data: bytes) -> int | None:
    """The generation it leads to; None: it is being written just now."""
    if len(data) != LINK_BYTES:
        return None
    generation, checksum = _LINK.unpack(data)
    return int(generation) if zlib.crc32(generation.to_bytes(8, "little")) == checksum else None

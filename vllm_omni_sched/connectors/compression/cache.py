"""A cache of compressed buffers by content, so that a buffer for several consumers is compressed once."""

import hashlib
import threading
from collections import OrderedDict
from dataclasses import dataclass

from vllm_omni_sched.connectors.compression.dtypes import Bytes

DIGEST_BYTES = 16

Key = tuple[bytes, str, tuple[int, ...], str]
"""Digest of the content, data type, shape, codec."""


def content_digest(raw: Bytes, content_key: str | None = None) -> bytes:
    """Return the BLAKE2b of the bytes, at about 1 GB/s, or of ``content_key`` if the owner has a name for the content.

    The hash is cryptographic, because content comes from users: a collision would give one user's data to another.
    """
    if content_key is not None:
        return hashlib.blake2b(content_key.encode(), digest_size=DIGEST_BYTES, person=b"key").digest()
    return hashlib.blake2b(raw.data, digest_size=DIGEST_BYTES, person=b"content").digest()


@dataclass(frozen=True)
class CacheCounts:
    """Hits and misses so far, and the current size."""

    hits: int
    misses: int
    num_entries: int
    num_bytes: int


class CompressionCache:
    """Evicts the least recently used buffer first.

    1. It never holds more than ``max_bytes`` of compressed data; a larger buffer is not kept, and 0 keeps none.
    2. Several threads may use it. If two miss the same buffer at once, both compress it.

    Raises:
        ValueError: ``max_bytes`` is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must be 0 or more, got {max_bytes}")
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Key, Bytes] = OrderedDict()
        self._num_bytes = self._hits = self._misses = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Bytes | None:
        """Return the data that was put under ``key``, read-only; None if it is not cached."""
        with self._lock:
            data = self._entries.get(key)
            if data is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return data

    def put(self, key: Key, data: Bytes) -> None:
        """Keep ``data``, which must not be changed from now on."""
        if data.nbytes > self.max_bytes:
            return
        data = data.view()
        data.flags.writeable = False
        with self._lock:
            self._forget(key)
            self._entries[key] = data
            self._num_bytes += data.nbytes
            while self._num_bytes > self.max_bytes:
                self._forget(next(iter(self._entries)))

    def counts(self) -> CacheCounts:
        """Return the counts so far."""
        with self._lock:
            return CacheCounts(self._hits, self._misses, len(self._entries), self._num_bytes)

    def _forget(self, key: Key) -> None:
        if (data := self._entries.pop(key, None)) is not None:
            self._num_bytes -= data.nbytes

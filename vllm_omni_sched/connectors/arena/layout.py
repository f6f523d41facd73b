"""The layout of an outbox's file.

::

    0      head: magic, version, slots, offset and length of the ring, pid
    1024   how many messages were shown, by the last byte of their digests: 256 u32
    4096   digests: one u64 per slot, 0 where the slot is free
    …      records: one per slot (`Record`)
    …      ring
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from typing import NamedTuple

MAGIC, VERSION = b"vosarena", 1
PAGE = 4096
HEAD = struct.Struct("<8sIIQQI")
RECORD = struct.Struct("<IIIIQQQd")
REVOKED = struct.Struct("<I")
RECORD_BYTES = 64
BUCKET = 16
DIGEST = struct.Struct("<Q")


class State(IntEnum):
    """State of a slot: the sender changes FREE to READY and back to FREE; a receiver READY to LEASED to CONSUMED."""

    FREE = 0
    READY = 1
    LEASED = 2
    CONSUMED = 3


class Record(NamedTuple):
    """A message in an outbox.

    ``pool`` 0 is the ring; ``holder`` is the number of the receiver that has leased it; ``revoked`` is 1 if its sender
    has replaced it while another process had it locked.
    """

    state: int
    generation: int
    pool: int
    revoked: int
    offset: int
    nbytes: int
    holder: int
    put_at: float


POOL_AT, REVOKED_AT, HOLDER_AT, PUT_AT = 8, 12, 32, 40  # within a record
LONG_NAME = 512
"""Length in bytes above which names are not cached."""
RING = 0
"""Pool number of the ring, the room for small messages in the outbox itself."""
NEWS_AT, NEWS_KINDS = 1024, 256
"""Counters in the first page: for each value of a digest's last byte, the number of messages shown with it."""


class Layout(NamedTuple):
    """Offsets within the file of an outbox."""

    slots: int
    records: int
    ring: int
    ring_bytes: int

    @classmethod
    def of(cls, slots: int, ring_bytes: int) -> Layout:
        """Return the layout of a file with that many slots, rounded up to a power of two of whole buckets."""
        slots = max(2 * BUCKET, 1 << (slots - 1).bit_length())
        records = PAGE + slots * DIGEST.size
        ring = -(-(records + slots * RECORD_BYTES) // PAGE) * PAGE
        return cls(slots, records, ring, -(-ring_bytes // PAGE) * PAGE)

    @property
    def nbytes(self) -> int:
        return self.ring + self.ring_bytes

    @property
    def buckets(self) -> int:
        return self.slots // BUCKET

    def digest_at(self, slot: int) -> int:
        return PAGE + slot * DIGEST.size

    def record_at(self, slot: int) -> int:
        return self.records + slot * RECORD_BYTES


def digest_of(name: bytes) -> int:
    """Return 64 bits of a name, never 0. A receiver that finds a message by it compares the name in the message."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") or 1


def buckets_of(digest: int, buckets: int) -> tuple[int, int]:
    """Return the two buckets in which a message may be; the sender takes the emptier one, which balances them."""
    return digest & (buckets - 1), (digest >> 32) & (buckets - 1)

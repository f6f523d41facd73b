"""A store of encodings that engines of several hosts share, as objects of a Mooncake store."""

from __future__ import annotations

import hashlib
import secrets
import struct
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import RendezvousError
from vllm_omni_sched.connectors.encodings import ClaimOutcome, PutOutcome, StoreUse
from vllm_omni_sched.connectors.lifetime import Lifetimes
from vllm_omni_sched.connectors.mooncake.buffers import BufferPool, PooledBuffer
from vllm_omni_sched.connectors.mooncake.calls import HangingError
from vllm_omni_sched.connectors.mooncake.options import SharedStoreOptions
from vllm_omni_sched.connectors.mooncake.store import LEASE_OVER, MISSING, NO_ROOM, NOT_READY, OK, RPC, Store

EXISTS = -705
"""Return code of a put under a key that has an object, where the library returns one."""

_HEAD = struct.Struct("<4s16sQI")  # magic, digest of the key, bytes of the encoding, and their CRC-32
_MAGIC = b"OSE1"
_TOKEN = struct.Struct("<Q")
_CLAIM = struct.Struct("<QQ")  # token of the member, and number of its claim
_SHARE = 0.9  # of the segment that encodings may fill: its blocks are larger than what is in them

_lifetimes = Lifetimes()


@dataclass
class _Seen:
    """A claim of another member, since when it is known, and its content."""

    content: bytes
    since: float


class MooncakeEncodings:
    """The encodings of one space in a Mooncake store, as a `SharedStore`.

    1. An encoding lies in the memory that the member lends that put it, if there is room, and leaves with that member.
       Readers check its length and its CRC-32, and that it belongs to the key.
    2. A member keeps its own encodings below nine tenths of the memory that it lends: those that it put first leave
       first, but not while somebody reads them. All leave ``ttl_seconds`` after they were put. The master may evict
       them earlier.
    3. A claim is an object, too: the member whose object is there has it. It leaves with its member, when the master
       has missed that member for its ``-client_ttl``.
    4. A claim that a member has seen unchanged for ``claim_seconds`` is removed by that member: whoever made it has
       hung, or was cut off.
    5. An encoding whose holder cannot be reached is none to `get`, and is not claimed: it is made without a claim.

    Args:
        options: of the client.
        space: name of what is shared; encodings of different models must not meet.
        ttl_seconds: see rule 2.
        claim_seconds: see rule 4.
        clock: seconds.

    Raises:
        ConfigError: the library is not installed, or does not load.
        RendezvousError: there is no master.
    """

    def __init__(
        self,
        options: SharedStoreOptions,
        space: str,
        *,
        ttl_seconds: float,
        claim_seconds: float,
        clock: Clock = monotonic_seconds,
    ) -> None:
        self._prefix = f"{options.namespace}/{space}"
        self._ttl_seconds, self._claim_seconds, self._clock = ttl_seconds, claim_seconds, clock
        self.max_bytes = int(options.segment * _SHARE) if options.segment else 1 << 60
        self._own: OrderedDict[str, tuple[int, float]] = OrderedDict()  # stored key -> bytes, when it was put
        self._own_bytes = 0
        self._claims: dict[str, bytes] = {}  # key of the claim -> its content
        self._seen: dict[str, _Seen] = {}
        self._token, self._numbers = secrets.randbits(64), count(1)
        self._store = Store(options, clock)
        try:
            self._buffers = BufferPool(self._store, options.localbuf)
        except BaseException:
            self._store.close()
            raise
        self._config = self._store.config(pinned=False)
        self._closed = False
        _lifetimes.add(self)

    # -- reading -----------------------------------------------------------

    def has(self, key: str) -> bool:
        """Return whether the encoding is in the store now; see `SharedStore.has`."""
        return self._store.exist([self._encoding(key)]) == [True]

    def get(self, key: str) -> bytes | None:
        """Return the encoding, or None if there is none that can be read."""
        stored = self._encoding(key)
        nbytes = self._store.size(stored)
        if nbytes == RPC:
            raise self._store.gone(nbytes)
        if nbytes <= 0:
            return None
        found = self._read(stored, nbytes)
        return None if found is None else _opened(key, found)

    # -- making ------------------------------------------------------------

    def claim(self, keys: Sequence[str]) -> ClaimOutcome:
        """Claim by rules 3 and 4; see `SharedStore.claim`."""
        wanted = sorted(set(keys), key=_digest)  # all members in one order
        stored = [self._encoding(key) for key in wanted]
        claims = [self._claim_key(key) for key in wanted]
        made: list[str] = []
        try:
            there = self._store.exist([*stored, *claims])
            lacking = [at for at in range(len(wanted)) if not there[at]]
            for at in lacking:
                if claims[at] in self._claims:
                    continue
                if not self._take(claims[at], there[len(wanted) + at]):
                    self._give_up(made)
                    return ClaimOutcome.OTHERS
                made.append(claims[at])
            if made:  # an encoding may have been put, and its claim ended, before it was claimed here
                there = self._store.exist([stored[at] for at in lacking])
                self._give_up([claims[at] for at, is_there in zip(lacking, there, strict=True) if is_there])
        except RendezvousError:
            self._forget(made)
            raise
        return ClaimOutcome.OURS

    def release(self, key: str) -> None:
        """Give up this member's claim, if it has one."""
        self._give_up([self._claim_key(key)])

    def put(self, key: str, data: bytes) -> PutOutcome:
        """Put an encoding by rules 1 and 2, and end the claim on it."""
        try:
            return self._put(key, data)
        finally:
            claim = self._claim_key(key)
            self._claims.pop(claim, None)
            self._store.remove([claim])

    def _put(self, key: str, data: bytes) -> PutOutcome:
        stored, nbytes = self._encoding(key), _HEAD.size + len(data)
        if nbytes > self.max_bytes:
            return PutOutcome.TOO_LARGE
        if self.has(key):
            return PutOutcome.KNOWN
        self._make_room(nbytes)
        if self._own_bytes + nbytes > self.max_bytes:
            return PutOutcome.NO_ROOM
        room = self._room(nbytes)
        room.data[: _HEAD.size] = bytearray(_HEAD.pack(_MAGIC, _digest(key), len(data), zlib.crc32(data)))
        room.data[_HEAD.size :] = memoryview(data)
        code = self._add(stored, room, nbytes)
        if code == EXISTS:
            return PutOutcome.KNOWN
        if code == NO_ROOM:
            return PutOutcome.NO_ROOM
        if code != OK:
            raise RendezvousError(f"encoding {key[:80]!r} was not put: Mooncake says {code}")
        self._own[stored] = (nbytes, self._clock())
        self._own_bytes += nbytes
        return PutOutcome.STORED

    # -- care --------------------------------------------------------------

    def tidy(self) -> None:
        """Remove own encodings that have expired, and ask the master for a sign of life."""
        self._store.exist([f"{self._prefix}/nothing"])
        self._evict([stored for stored, (_, at) in self._own.items() if self._clock() - at >= self._ttl_seconds])
        now = self._clock()
        self._seen = {claim: one for claim, one in self._seen.items() if now - one.since < 2 * self._claim_seconds}

    def use(self) -> StoreUse:
        """Return how many encodings this member has put, and their bytes."""
        return StoreUse(len(self._own), self._own_bytes)

    def close(self) -> None:
        """Give up all claims, and leave; own encodings leave with the memory that was lent."""
        if self._closed:
            return
        self._closed = True
        if not self._store.sick:
            self._forget(list(self._claims))
        self._store.close()

    def abandon(self) -> None:
        """Do nothing in a forked child: `Store` keeps the client, whose sockets the child shares with its parent."""

    def _make_room(self, nbytes: int) -> None:
        """Evict own encodings, the oldest first, until so many bytes fit."""
        for stored in list(self._own):
            if self._own_bytes + nbytes <= self.max_bytes:
                return
            self._evict([stored])

    def _evict(self, keys: list[str]) -> None:
        for stored, code in zip(keys, self._store.remove(keys, leased=False), strict=True):
            if code in (OK, MISSING):
                self._own_bytes -= self._own.pop(stored)[0]

    def _take(self, claim: str, is_there: bool) -> bool:
        """Put a claim; return whether the one that is there then is ours.

        Args:
            claim: its key.
            is_there: whether there was one a moment ago.
        """
        if is_there:
            found = self._read(claim, _CLAIM.size)
            if found is not None and not self._is_stale(claim, found):
                return False
            if found is not None:
                self._store.remove([claim])
        own = _CLAIM.pack(self._token, next(self._numbers))
        room = self._room(_CLAIM.size)
        room.data[:] = bytearray(own)
        code = self._add(claim, room, _CLAIM.size)
        if code == NO_ROOM:
            return True  # the encoding is made without a claim
        if code not in (OK, EXISTS):
            raise RendezvousError(f"a claim was not put: Mooncake says {code}")
        if self._read(claim, _CLAIM.size) != own:
            return False
        self._claims[claim] = own
        self._seen.pop(claim, None)
        return True

    def _is_stale(self, claim: str, content: bytes) -> bool:
        """Note a claim of another member; return whether it has been the same for ``claim_seconds``.

        One of this member that it does not know of is stale, too: it was put, and then the store did not answer.
        """
        if content.startswith(_TOKEN.pack(self._token)):
            return True
        now, seen = self._clock(), self._seen.get(claim)
        if seen is None or seen.content != content:
            self._seen[claim] = _Seen(content, now)
            return False
        return now - seen.since >= self._claim_seconds

    def _give_up(self, claims: list[str]) -> None:
        """Remove those of the claims that are ours."""
        ours = [claim for claim in claims if self._claims.pop(claim, None) is not None]
        self._store.remove(ours)

    def _forget(self, claims: list[str]) -> None:
        """Remove claims as far as the store answers; those that stay end by rule 3 or 4."""
        try:
            self._give_up(claims)
        except RendezvousError:
            for claim in claims:
                self._claims.pop(claim, None)

    def _add(self, stored: str, room: PooledBuffer, nbytes: int) -> int:
        """Put the content of a room, which is free then; return a code.

        Raises:
            RendezvousError: the store does not answer.
        """

        def late(code: int | None) -> None:
            self._buffers.give_back(room)

        try:
            code = self._store.add_from(stored, room.address, nbytes, self._config, late)
        except HangingError:
            raise  # `late` gives it back
        except BaseException:
            self._buffers.give_back(room)
            raise
        self._buffers.give_back(room)
        if code == RPC:
            raise self._store.gone(code)
        return code

    def _read(self, stored: str, nbytes: int) -> bytes | None:
        """Return an object of that size; None if it is gone, and nothing if its holder cannot be reached.

        Raises:
            MasterGoneError: the master does not answer.
        """
        room = self._room(nbytes)

        def late(code: int | None) -> None:
            self._buffers.give_back(room)

        try:
            code = self._store.get_into(stored, room.address, nbytes, late)
        except HangingError:  # `late` gives it back
            return b""
        except BaseException:
            self._buffers.give_back(room)
            raise
        found = room.data.tobytes() if code in (nbytes, LEASE_OVER) else b""
        self._buffers.give_back(room)
        if code == RPC:
            raise self._store.gone(code)
        return None if code in (MISSING, NOT_READY) else found

    def _room(self, nbytes: int) -> PooledBuffer:
        return self._buffers.take(nbytes) or self._buffers.make(nbytes)

    def _encoding(self, key: str) -> str:
        return f"{self._prefix}/{_digest(key).hex()}"

    def _claim_key(self, key: str) -> str:
        return f"{self._prefix}/{_digest(key).hex()}/claim"


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=16).digest()


def _opened(key: str, found: bytes) -> bytes | None:
    """Return the encoding in an object; None if it is not that of the key, or was altered."""
    magic, digest, nbytes, checksum = _HEAD.unpack_from(found) if len(found) >= _HEAD.size else (b"", b"", 0, 0)
    data = found[_HEAD.size :]
    if (magic, digest, nbytes) != (_MAGIC, _digest(key), len(data)) or zlib.crc32(data) != checksum:
        return None
    return data

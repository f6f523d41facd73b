"""Compression of a message's buffers where that saves time, with a cache by content."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import CorruptDataError
from vllm_omni_sched.connectors.compression.codec import Codec, ErrorBound, Kind, check_buffer, kind_of
from vllm_omni_sched.connectors.compression.decide import (
    Candidate,
    Ledger,
    Plan,
    Reason,
    Snapshot,
    Stream,
    decide,
    raw_anyway,
    sample,
)
from vllm_omni_sched.connectors.compression.dtypes import Bytes
from vllm_omni_sched.connectors.compression.options import CompressionOptions, ForEdge
from vllm_omni_sched.connectors.compression.registry import Codecs, load_codecs
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)


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
    """Counts hits and misses of the cache, and its current size."""

    hits: int
    misses: int
    num_entries: int
    num_bytes: int


class CompressionCache:
    """Cache of compressed buffers that evicts the least recently used one first.

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


RAW = "raw"
"""Name used instead of a codec's for a buffer that is not compressed."""
PROBE_RUNS = 2  # the faster run counts, because the first may find cold tables


@dataclass(frozen=True)
class Buffer:
    """One tensor as flat bytes, with its data type as torch names it.

    ``kind`` overrides the guess of `kind_of`; ``content_key`` is a unique name of this content, such as an ``mm_hash``
    with the stage, which saves hashing it for the cache.

    Raises:
        ValueError: ``raw`` is not flat, contiguous, uint8 and of the size that type and shape give.
    """

    raw: Bytes
    dtype: str
    shape: tuple[int, ...]
    kind: Kind | None = None
    content_key: str | None = None

    def __post_init__(self) -> None:
        check_buffer(self.raw, self.dtype, self.shape)


@dataclass(frozen=True)
class Packed:
    """The form in which a buffer is sent: ``codec`` (or `RAW`), ``dtype`` and ``shape`` in the header, then ``data``.

    ``data`` must not be changed: it may be the buffer itself, or in the cache. ``error_bound`` is None if lossless.
    """

    codec: str
    dtype: str
    shape: tuple[int, ...]
    data: Bytes
    kind: Kind
    reason: Reason
    error_bound: ErrorBound | None = None


@dataclass(frozen=True)
class Counts:
    """Buffers by kind, codec and reason; bytes before and after compression; counts of the cache."""

    buffers: dict[tuple[Kind, str, Reason], int]
    raw_bytes: int
    sent_bytes: int
    cache: CacheCounts


class Compressor:
    """Compressor of buffers that decides for each of them and learns from the results.

    1. `decide` makes the decision; a probe tries codecs on a sample from the buffer's middle.
    2. Encoded buffers correct the estimates of probes. A buffer that does not shrink, or is declined, is sent raw.
    3. A cached buffer costs a hash, and is not learned from. The time of hashing counts as encoding.
    4. Several threads may use it.
    """

    def __init__(
        self,
        options: CompressionOptions | None = None,
        *,
        clock: Clock = monotonic_seconds,
        codecs: Codecs | None = None,
    ) -> None:
        self.options = options or CompressionOptions()
        self.codecs = codecs or load_codecs()
        self.cache = CompressionCache(self.options.cache_bytes)
        self._of_edge = {edge: self.options.of_edge(edge) for edge in self.options.edges}
        self._of_others = self.options.of_edge("")
        self._clock = clock
        self._ledger = Ledger(self.options.reprobe_every)
        self._lock = threading.Lock()  # guards the ledger and the counts
        self._buffers: Counter[tuple[Kind, str, Reason]] = Counter()
        self._raw_bytes = self._sent_bytes = 0
        for name, why in self.codecs.absent.items():
            logger.info("Compression codec %s is not available: %s", name, why)
        for edge, own in self._of_edge.items():
            if own.lossy is not None:
                bound = self.codecs.get(own.lossy).error_bound("float32")
                logger.warning(
                    "Edge %s may be compressed lossily by codec %s: float32 within %s", edge, own.lossy, bound
                )

    def sends_raw(self, edge: str, num_bytes: int, link_bytes_per_second: float | None) -> bool:
        """Return whether `compress` would change none of several buffers, which have so many bytes together.

        If so, the bytes are counted as sent, and `compress` need not be called.
        """
        options = self._of_edge.get(edge, self._of_others)
        if raw_anyway(options.mode, num_bytes, options.min_bytes, link_bytes_per_second) is None:
            return False
        with self._lock:
            self._raw_bytes += num_bytes
            self._sent_bytes += num_bytes
        return True

    def compress(
        self, edge: str, buffers: Sequence[Buffer], link_bytes_per_second: float | None = None
    ) -> list[Packed]:
        """Return the form in which to send each buffer over ``edge``, ``from_stage->to_stage``.

        ``link_bytes_per_second`` is the measured speed; None if the receiver shares memory with the sender.

        Raises:
            ValueError: the link's speed is not above 0.
        """
        if link_bytes_per_second is not None and not link_bytes_per_second > 0:
            raise ValueError(f"link_bytes_per_second must be above 0, got {link_bytes_per_second}")
        options = self._of_edge.get(edge, self._of_others)
        return [self._compress(edge, options, buffer, link_bytes_per_second) for buffer in buffers]

    def decompress(
        self, codec: str, data: bytes | bytearray | memoryview | Bytes, dtype: str, shape: tuple[int, ...], out: Bytes
    ) -> None:
        """Write a received buffer into ``out``.

        Raises:
            CodecMissingError: this side does not have the codec.
            CorruptDataError: ``data`` cannot have been written by the codec.
            ValueError: ``out`` is not writeable, flat, contiguous and of the stated size.
        """
        if codec == RAW:
            check_buffer(out, dtype, shape)
            flat = np.frombuffer(data, np.uint8)
            if flat.size != out.size:
                raise CorruptDataError(f"{dtype} of shape {shape} is {out.size} bytes, got {flat.size}")
            out[:] = flat
        else:
            self.codecs.get(codec).decode(data, dtype, shape, out)

    def counts(self) -> Counts:
        """Return the counts so far."""
        with self._lock:
            return Counts(dict(self._buffers), self._raw_bytes, self._sent_bytes, self.cache.counts())

    def _compress(self, edge: str, options: ForEdge, buffer: Buffer, link: float | None) -> Packed:
        kind = buffer.kind or kind_of(buffer.dtype, buffer.shape)
        plan = self._plan((edge, kind, buffer.dtype), options, buffer, link)
        data, codec, reason = None, plan.codec, plan.reason
        if codec is not None:
            data = self._encoded((edge, kind, buffer.dtype), self.codecs.get(codec), buffer)
            if data is None:
                reason = Reason.DECLINED
            elif data.size >= buffer.raw.size:
                data, reason = None, Reason.DOES_NOT_SHRINK
        if codec is None or data is None:
            packed = Packed(RAW, buffer.dtype, buffer.shape, buffer.raw, kind, reason)
        else:
            bound = self.codecs.get(codec).error_bound(buffer.dtype)
            packed = Packed(codec, buffer.dtype, buffer.shape, data, kind, reason, bound)
        with self._lock:
            self._buffers[kind, packed.codec, reason] += 1
            self._raw_bytes += buffer.raw.size
            self._sent_bytes += packed.data.size
        return packed

    def _plan(self, stream: Stream, options: ForEdge, buffer: Buffer, link: float | None) -> Plan:
        if reason := raw_anyway(options.mode, buffer.raw.size, options.min_bytes, link):
            return Plan(reason)
        found = self.codecs.suited_to(stream[1], buffer.dtype, buffer.shape)
        with self._lock:
            due = self._ledger.count(stream)

        def ask(due: bool) -> Plan:
            with self._lock:
                candidates = tuple(
                    Candidate(codec.name, codec.lossy, self._ledger.measured(stream, codec.name)) for codec in found
                )
            return decide(
                Snapshot(
                    buffer.raw.size, link, candidates, options.mode, options.lossy, options.min_bytes, probe_due=due
                )
            )

        plan = ask(due)
        if plan.reason is Reason.PROBE:
            for codec in plan.probe:
                self._probe(stream, self.codecs.get(codec), buffer)
            plan = ask(due=False)
        return plan

    def _probe(self, stream: Stream, codec: Codec, buffer: Buffer) -> None:
        part, shape = sample(buffer.raw, buffer.dtype, buffer.shape, self.options.probe_bytes)
        if not codec.suits(buffer.dtype, shape):  # fewer rows than the codec needs
            part, shape = buffer.raw, buffer.shape
        out, data = np.empty_like(part), None
        encode_seconds = decode_seconds = float("inf")
        for _ in range(PROBE_RUNS):
            started = self._clock()
            data = codec.encode(part, buffer.dtype, shape)
            encoded = self._clock()
            encode_seconds = min(encode_seconds, encoded - started)
            if data is None:
                break
            codec.decode(data, buffer.dtype, shape, out)
            decode_seconds = min(decode_seconds, self._clock() - encoded)
        with self._lock:
            self._ledger.encoded(stream, codec.name, part.size, None if data is None else data.size, encode_seconds)
            if data is not None:
                self._ledger.decoded(stream, codec.name, part.size, decode_seconds)

    def _encoded(self, stream: Stream, codec: Codec, buffer: Buffer) -> Bytes | None:
        started = self._clock()
        key = None
        if self.cache.max_bytes:
            key = (content_digest(buffer.raw, buffer.content_key), buffer.dtype, buffer.shape, codec.name)
            if (cached := self.cache.get(key)) is not None:
                return cached
        data = codec.encode(buffer.raw, buffer.dtype, buffer.shape)
        with self._lock:
            size = None if data is None else data.size
            self._ledger.encoded(stream, codec.name, buffer.raw.size, size, self._clock() - started)
        if key is not None and data is not None and data.size < buffer.raw.size:
            self.cache.put(key, data)
        return data

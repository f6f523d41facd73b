"""Compression of a message's buffers where that saves time, with a cache by content."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_omni_sched.config.errors import CodecMissingError, CorruptDataError
from vllm_omni_sched.config.extras import how_to_install
from vllm_omni_sched.connectors.compression.codec import Bytes, Codec, check_buffer
from vllm_omni_sched.connectors.compression.lossless import IdsCodec, ZstdCodec
from vllm_omni_sched.connectors.compression.lossy import Int8Codec, MuLawCodec
from vllm_omni_sched.connectors.compression.options import CompressionOptions, ForEdge, Mode
from vllm_omni_sched.logs import get_logger

logger = get_logger(__name__)

CODECS: tuple[type[Codec], ...] = (IdsCodec, ZstdCodec, Int8Codec, MuLawCodec)
"""All codecs; of the lossless ones, the first that takes a buffer is used."""
RAW = "raw"
"""Name used instead of a codec's for a buffer that is not compressed."""
OVERHEAD_SECONDS = 5e-4
"""Time that a compressed buffer takes on both sides besides encoding and decoding: it is wrapped and unwrapped by code
that has not run for a while. Measured between processes that are idle between two messages (`benchmarks.hosts`)."""
TRY_AGAIN = 256
"""Buffers of a stream after which a codec is tried again that did not make them small enough."""

Key = tuple[bytes, str, tuple[int, ...], str]
"""Digest of the content, data type, shape, codec."""


def pays(num_bytes: int, size_fraction: float, codec: Codec, link_bytes_per_second: float) -> bool:
    """Return whether to encode, send and decode a buffer takes less time than to send it.

    Args:
        size_fraction: bytes after encoding, for each byte before.
    """
    saved = num_bytes * (1 - size_fraction) / link_bytes_per_second
    return saved > num_bytes * codec.seconds_per_byte + OVERHEAD_SECONDS


class CompressionCache:
    """Cache of compressed buffers that evicts the least recently used one first.

    1. It never holds more than ``max_bytes`` of compressed data; a larger buffer is not kept, and 0 keeps none.
    2. Several threads may use it. If two miss the same buffer at once, both compress it.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[Key, Bytes] = OrderedDict()
        self.num_bytes = self.hits = self.misses = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Bytes | None:
        """Return the data that was put under ``key``, read-only; None if it is not cached."""
        with self._lock:
            data = self._entries.get(key)
            if data is None:
                self.misses += 1
                return None
            self.hits += 1
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
            self.num_bytes += data.nbytes
            while self.num_bytes > self.max_bytes:
                self._forget(next(iter(self._entries)))

    def _forget(self, key: Key) -> None:
        if (data := self._entries.pop(key, None)) is not None:
            self.num_bytes -= data.nbytes


@dataclass(frozen=True)
class Buffer:
    """One tensor as flat bytes, with its data type as torch names it.

    Raises:
        ValueError: ``raw`` is not flat, contiguous, uint8 and of the size that type and shape give.
    """

    raw: Bytes
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_buffer(self.raw, self.dtype, self.shape)


class Packed(NamedTuple):
    """Sent form of a buffer; ``data`` must not be changed: it may be the buffer itself, or in the cache."""

    codec: str  # or `RAW`
    data: Bytes


class Compressor:
    """Compressor of buffers that decides for each of them.

    1. Nothing is compressed below ``min_bytes``, or where the speed of the link is not known, as on shared memory.
    2. An edge's lossy codec comes first; then ids are narrowed, and anything else is shuffled and compressed.
    3. A codec is used if `pays` says so. Buffers of an edge and data type are expected to shrink as the last one did;
       the first of them, and each `TRY_AGAIN`-th later, is expected to shrink to nothing. Mode 'always' does not ask.
    4. A buffer that does not shrink, or whose values do not suit the codec, is sent as it is.
    5. Several threads may use it.
    """

    def __init__(self, options: CompressionOptions | None = None) -> None:
        self.options = options or CompressionOptions()
        self.codecs: dict[str, Codec] = {}
        self._absent: dict[str, str] = {}
        for kind in CODECS:  # imports their libraries now, not in the middle of a transfer
            try:
                self.codecs[kind.name] = kind()
            except (ImportError, OSError) as error:
                self._absent[kind.name] = str(error)
                logger.info("Compression codec %s is not available: %s", kind.name, error)
        self.cache = CompressionCache(self.options.cache_bytes)
        self._of_edge = {edge: self.options.of_edge(edge) for edge in self.options.edges}
        self._of_others = self.options.of_edge("")
        self._lock = threading.Lock()  # of the next ones
        self._expected: dict[tuple[str, str, str], tuple[float, int]] = {}
        self.raw_bytes = self.sent_bytes = 0
        for edge, own in self._of_edge.items():
            if own.lossy is not None:
                logger.warning("Edge %s may be compressed lossily by codec %s", edge, own.lossy)

    def sends_raw(self, edge: str, num_bytes: int, link_bytes_per_second: float | None) -> bool:
        """Return whether `compress` would change none of several buffers, which have so many bytes together.

        If so, the bytes are counted as sent, and `compress` need not be called.
        """
        if _is_asked(self._of_edge.get(edge, self._of_others), num_bytes, link_bytes_per_second):
            return False
        self._count(num_bytes, num_bytes)
        return True

    def compress(
        self, edge: str, buffers: Sequence[Buffer], link_bytes_per_second: float | None = None
    ) -> list[Packed]:
        """Return the form in which to send each buffer over ``edge``, ``from_stage->to_stage``.

        ``link_bytes_per_second`` is the measured speed; None if it is not known, or sender and receiver share memory.
        """
        options = self._of_edge.get(edge, self._of_others)
        found = []
        for buffer in buffers:
            packed = self._compress(edge, options, buffer, link_bytes_per_second)
            self._count(buffer.raw.size, packed.data.size)
            found.append(packed)
        return found

    def decompress(
        self, codec: str, data: bytes | bytearray | memoryview | Bytes, dtype: str, shape: tuple[int, ...], out: Bytes
    ) -> None:
        """Write a received buffer into ``out``.

        Raises:
            CodecMissingError: this side does not have the codec; the message tells how to get it.
            CorruptDataError: ``data`` cannot have been written by the codec.
            ValueError: ``out`` is not writeable, flat, contiguous and of the stated size.
        """
        if codec == RAW:
            check_buffer(out, dtype, shape)
            flat = np.frombuffer(data, np.uint8)
            if flat.size != out.size:
                raise CorruptDataError(f"{dtype} of shape {shape} is {out.size} bytes, got {flat.size}")
            out[:] = flat
        elif codec in self.codecs:
            self.codecs[codec].decode(data, dtype, shape, out)
        elif codec in self._absent:
            raise CodecMissingError(
                f"codec {codec!r} is not available: {self._absent[codec]}; "
                f"{how_to_install('compression')}, or switch compression off where the data is sent"
            )
        else:
            known = ", ".join(self.codecs)
            raise CodecMissingError(
                f"codec {codec!r} is unknown; known are {known}: do both sides run the same version?"
            )

    def facts(self) -> dict[str, int]:
        """Return numbers for `Health.facts`."""
        sizes = {"raw_bytes": self.raw_bytes, "packed_bytes": self.sent_bytes}
        return {**sizes, "cache_hits": self.cache.hits, "cache_misses": self.cache.misses}

    def _compress(self, edge: str, options: ForEdge, buffer: Buffer, link: float | None) -> Packed:
        nbytes = buffer.raw.size
        if not _is_asked(options, nbytes, link):
            return Packed(RAW, buffer.raw)
        for codec in self._suited(options, buffer):
            stream = (edge, buffer.dtype, codec.name)
            fraction = self._expect(stream)
            if options.mode is Mode.AUTO and link is not None and not pays(nbytes, fraction, codec, link):
                continue
            data = self._encoded(codec, buffer)
            with self._lock:
                self._expected[stream] = (1.0 if data is None else data.size / nbytes), self._expected[stream][1]
            if data is not None and data.size < nbytes:
                return Packed(codec.name, data)
        return Packed(RAW, buffer.raw)

    def _suited(self, options: ForEdge, buffer: Buffer) -> Iterator[Codec]:
        """Yield the codecs to try: the lossy one of an edge, if it names one, and then the lossless ones."""
        for codec in sorted(self.codecs.values(), key=lambda codec: not codec.lossy):
            if (not codec.lossy or codec.name == options.lossy) and codec.suits(buffer.dtype, buffer.shape):
                yield codec

    def _expect(self, stream: tuple[str, str, str]) -> float:
        with self._lock:
            fraction, count = self._expected.get(stream, (0.0, 0))
            if count >= TRY_AGAIN:
                fraction, count = 0.0, 0
            self._expected[stream] = fraction, count + 1
        return fraction

    def _encoded(self, codec: Codec, buffer: Buffer) -> Bytes | None:
        if not self.cache.max_bytes:
            return codec.encode(buffer.raw, buffer.dtype, buffer.shape)
        # cryptographic, because content comes from users: a collision would give one user's data to another
        digest = hashlib.blake2b(buffer.raw.data, digest_size=16).digest()
        key = (digest, buffer.dtype, buffer.shape, codec.name)
        if (data := self.cache.get(key)) is None:
            data = codec.encode(buffer.raw, buffer.dtype, buffer.shape)
            if data is not None and data.size < buffer.raw.size:
                self.cache.put(key, data)
        return data

    def _count(self, raw_bytes: int, sent_bytes: int) -> None:
        with self._lock:
            self.raw_bytes += raw_bytes
            self.sent_bytes += sent_bytes


def _is_asked(options: ForEdge, num_bytes: int, link_bytes_per_second: float | None) -> bool:
    """Return whether codecs may be used at all: rule 1 of `Compressor`; mode 'always' needs no speed of the link."""
    if options.mode is Mode.OFF or num_bytes < max(1, options.min_bytes):
        return False
    return link_bytes_per_second is not None or options.mode is Mode.ALWAYS

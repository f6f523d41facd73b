"""Lossless codecs: token ids as narrow integers or a dictionary, and any data by shuffle and Zstandard."""

from __future__ import annotations

import struct
from functools import cache
from types import ModuleType
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vllm_omni_sched.connectors.compression.codec import ITEM_BYTES, Bytes, Codec, lookup, num_elements

HEADER = struct.Struct("<BHq")  # bytes per value, entries of the dictionary or 0, reference
MAX_ENTRIES = 256
PROBED_VALUES = 1024
DENSE_RANGE = 1 << 22  # up to here distinct values are found in a table, beyond by sorting
Ints = npt.NDArray[np.signedinteger]


class IdsCodec(Codec):
    """Codec by frame of reference (Goldstein, Ramakrishnan, Shaft, "Compressing Relations and Indexes", ICDE 1998).

    1. Of int32 and int64, the differences to the smallest value are kept in 0, 1, 2, 3 or 4 bytes each. 3 bytes are
       what vocabularies above 65,536 need; they are kept as a plane of 2 bytes and one of 1.
    2. Where that takes more than a byte and at most 256 values are distinct, a dictionary and a byte each are used.
    3. Values whose range is too wide to gain anything are declined.

    Varints would take less for mixtures of small and large values, but no numpy operation reads them.
    """

    name: ClassVar[str] = "ids"
    seconds_per_byte = 0.4e-9

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return dtype in ("int32", "int64")

    def _encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes | None:
        values: Ints = raw.view(dtype)
        low, high = int(values.min()), int(values.max())
        width = ((high - low).bit_length() + 7) // 8
        if width > 1 and (found := _dictionary(values, low, high)) is not None:
            entries, codes = found
            return _packed(HEADER.pack(1, entries.size, 0), entries.astype("<i8"), codes)
        if width >= min(5, values.itemsize):
            return None
        header = HEADER.pack(width, 0, low)
        if width == 0:
            return _packed(header)
        if width == 3:
            offsets = _offsets(values, low, np.uint32)
            return _packed(header, offsets.astype(np.uint16), (offsets >> 16).astype(np.uint8))
        return _packed(header, _offsets(values, low, np.dtype(f"u{width}").type))

    def _decode(self, data: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes) -> None:
        if data.size < HEADER.size:
            raise self._corrupt(f"{data.size} bytes have no header")
        width, num_entries, reference = HEADER.unpack(data[: HEADER.size].tobytes())
        body, count, values = data[HEADER.size :], num_elements(shape), out.view(dtype)
        if width > 4 or num_entries > MAX_ENTRIES or (num_entries and width != 1):
            raise self._corrupt(f"width {width} with {num_entries} entries")
        if body.size != width * count + 8 * num_entries:
            raise self._corrupt(f"{body.size} bytes for {count} values of {width} bytes and {num_entries} entries")
        bounds = np.iinfo(dtype)
        if num_entries:
            entries, codes = body[: 8 * num_entries].view("<i8"), body[8 * num_entries :]
            if int(codes.max()) >= num_entries:
                raise self._corrupt("a value is beyond the dictionary")
            self._check_range(int(entries.min()), int(entries.max()), bounds)
            lookup(entries.astype(dtype), codes, values)
            return
        if width == 0:
            self._check_range(reference, reference, bounds)
            values[:] = reference
            return
        if width == 3:
            offsets = body[2 * count :].astype(np.uint32)
            offsets <<= 16
            offsets |= body[: 2 * count].view(np.uint16)
        else:
            offsets = body.view(f"u{width}")
        self._check_range(reference, reference + int(offsets.max()), bounds)
        values[:] = offsets
        values += np.array(reference, dtype)

    def _check_range(self, low: int, high: int, bounds: np.iinfo[np.signedinteger]) -> None:
        if low < bounds.min or high > bounds.max:
            raise self._corrupt(f"values from {low} to {high} in {bounds.dtype}")


def _offsets(values: Ints, low: int, width: type[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
    """Return ``values - low``, for differences that fit: cast first, because narrow arithmetic wraps and is faster."""
    offsets = values.astype(width)
    offsets -= width(low % (1 << 8 * offsets.itemsize))
    return offsets


def _dictionary(values: Ints, low: int, high: int) -> tuple[Ints, Bytes] | None:
    """Return the distinct values and the position of each value among them; None if there are too many."""
    if np.unique(values[:: -(-values.size // PROBED_VALUES)]).size > MAX_ENTRIES // 2:
        return None
    if high - low >= DENSE_RANGE:
        entries = np.unique(values)
        return (entries, np.searchsorted(entries, values).astype(np.uint8)) if entries.size <= MAX_ENTRIES else None
    offsets = (values - np.array(low, values.dtype)).astype(np.intp)
    codes_of = np.zeros(high - low + 1, np.uint8)
    codes_of[offsets] = 1
    present = np.flatnonzero(codes_of)
    if present.size > MAX_ENTRIES:
        return None
    codes_of[present] = np.arange(present.size, dtype=np.uint8)
    return (present + low).astype(values.dtype), codes_of[offsets]


def _packed(header: bytes, *parts: npt.NDArray[np.generic]) -> Bytes:
    return np.concatenate([np.frombuffer(header, np.uint8), *(part.view(np.uint8) for part in parts)])


BLOSC_HEADER = struct.Struct(
    "<BBBBIII"
)  # version, codec's version, flags, bytes per item; size, block, compressed size
VERSION = 2
MEMCPYED = 2  # flag: incompressible, kept as it is
FORMAT_SHIFT, FORMAT = 5, 4  # the flags above it name the compressor: Zstandard
LEVEL = 1
BY_BYTES = frozenset({"int32", "int64", "uint32", "uint64", "float16", "bfloat16"})


@cache
def blosc() -> ModuleType:
    """Return the binding of C-Blosc.

    Raises:
        ImportError: numcodecs is not installed.
    """
    from numcodecs import blosc as module

    # By default it starts threads when called from the main thread: those are the LLM's processors, and a pool of
    # threads does not survive a fork.
    module.use_threads = False
    loaded: ModuleType = module
    return loaded


class ZstdCodec(Codec):
    """Codec of any data by shuffle and Zstandard, for buffers up to 2 GiB.

    Bits are shuffled, so that noisy ones do not affect the others. Data types in `BY_BYTES` are shuffled by whole
    bytes, because that was measured to compress better.

    The library is numcodecs, for its C-Blosc: it shuffles and compresses block by block in the processor's cache.
    """

    name: ClassVar[str] = "shuffle_zstd"
    max_bytes: ClassVar[int] = (1 << 31) - 1 - BLOSC_HEADER.size
    seconds_per_byte = 3.3e-9

    def __init__(self) -> None:
        blosc()

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return True

    def _encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes:
        module, size = blosc(), ITEM_BYTES[dtype]
        shuffle = module.SHUFFLE if dtype in BY_BYTES else module.BITSHUFFLE
        return np.frombuffer(module.compress(raw.view(f"u{size}"), b"zstd", LEVEL, shuffle), np.uint8)

    def _decode(self, data: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes) -> None:
        # C-Blosc trusts the sizes in the header: it is not told how long the data really is.
        if data.size < BLOSC_HEADER.size:
            raise self._corrupt(f"{data.size} bytes have no header")
        version, _, flags, item, size, block, compressed = BLOSC_HEADER.unpack(data[: BLOSC_HEADER.size].tobytes())
        is_ours = version == VERSION and (flags & MEMCPYED or flags >> FORMAT_SHIFT == FORMAT)
        if not is_ours or item != ITEM_BYTES[dtype] or (size, compressed) != (out.size, data.size):
            raise self._corrupt(f"its header says {compressed} bytes of version {version} for {size} bytes")
        if not 0 < block <= size or block % item:
            raise self._corrupt(f"blocks of {block} bytes")
        try:
            blosc().decompress(data, out)
        except (RuntimeError, ValueError) as error:
            raise self._corrupt(str(error)) from None

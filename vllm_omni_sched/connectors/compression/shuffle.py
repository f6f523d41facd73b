"""Lossless compression of any data: bits or bytes of equal significance moved together, then LZ4 or Zstandard.

The library is numcodecs, for its C-Blosc: it shuffles and compresses block by block in the processor's cache, checks
what it decompresses against its bounds, has wheels for Python 3.10 to 3.13, is Zarr's, and needs numpy and
typing_extensions alone. (blosc2 would bring numexpr, httpx and more.)
"""

import struct
from functools import cache
from types import ModuleType
from typing import ClassVar

import numpy as np

from vllm_omni_sched.connectors.compression.codec import Codec
from vllm_omni_sched.connectors.compression.dtypes import ITEM_BYTES, Bytes

HEADER = struct.Struct("<BBBBIII")  # version, codec's version, flags, bytes per item; size, block, compressed size
VERSION = 2
MEMCPYED = 2  # flag: incompressible, kept as it is
WIDE_INTS = frozenset({"int32", "int64", "uint32", "uint64"})
FORMAT_SHIFT = 5  # the flags above it name the compressor


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


class ShuffleCodec(Codec):
    """Codec that shuffles and then applies a general compressor, for buffers up to 2 GiB.

    Bits are shuffled, so that noisy ones do not affect the others. Data types in ``by_bytes`` are shuffled by whole
    bytes, because that was measured to compress better.
    """

    max_bytes: ClassVar[int] = (1 << 31) - 1 - HEADER.size
    compressor: ClassVar[bytes]
    format: ClassVar[int]
    level: ClassVar[int]
    by_bytes: ClassVar[frozenset[str]]

    def __init__(self) -> None:
        blosc()

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return True

    def _encode(self, raw: Bytes, dtype: str, shape: tuple[int, ...]) -> Bytes:
        module, size = blosc(), ITEM_BYTES[dtype]
        shuffle = module.SHUFFLE if dtype in self.by_bytes else module.BITSHUFFLE
        return np.frombuffer(module.compress(raw.view(f"u{size}"), self.compressor, self.level, shuffle), np.uint8)

    def _decode(self, data: Bytes, dtype: str, shape: tuple[int, ...], out: Bytes) -> None:
        # C-Blosc trusts the sizes in the header: it is not told how long the data really is.
        if data.size < HEADER.size:
            raise self._corrupt(f"{data.size} bytes have no header")
        version, _, flags, item, size, block, compressed = HEADER.unpack(data[: HEADER.size].tobytes())
        is_ours = version == VERSION and (flags & MEMCPYED or flags >> FORMAT_SHIFT == self.format)
        if not is_ours or item != ITEM_BYTES[dtype] or (size, compressed) != (out.size, data.size):
            raise self._corrupt(f"its header says {compressed} bytes of version {version} for {size} bytes")
        if not 0 < block <= size or block % item:
            raise self._corrupt(f"blocks of {block} bytes")
        try:
            blosc().decompress(data, out)
        except (RuntimeError, ValueError) as error:
            raise self._corrupt(str(error)) from None


class Lz4Codec(ShuffleCodec):
    """Compresses by shuffle and LZ4, the fast way."""

    name: ClassVar[str] = "shuffle_lz4"
    compressor = b"lz4"
    format = 1
    level = 5
    by_bytes = WIDE_INTS


class ZstdCodec(ShuffleCodec):
    """Codec by shuffle and Zstandard, with the smaller result, for slow links."""

    name: ClassVar[str] = "shuffle_zstd"
    compressor = b"zstd"
    format = 4
    level = 1
    by_bytes = WIDE_INTS | {"float16", "bfloat16"}  # Huffman codes make something of exponents

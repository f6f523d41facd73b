"""What the suite over all codecs cannot say: forms, refusals and libraries."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from tests.support.buffers import bfloat16, buffer, flat
from vllm_omni_sched.config.errors import CodecMissingError, CorruptDataError
from vllm_omni_sched.connectors.compression.compressor import Compressor
from vllm_omni_sched.connectors.compression.lossless import HEADER, IdsCodec, ZstdCodec, blosc
from vllm_omni_sched.connectors.compression.lossy import Int8Codec


@pytest.mark.parametrize(
    ("top", "width"), [(0, 0), (255, 1), (256, 2), (65_535, 2), (65_536, 3), (2**24 - 1, 3), (2**24, 4), (2**32 - 1, 4)]
)
def test_ids_take_the_width_of_their_range(top, width):
    one = buffer(np.linspace(0, top, 1000).astype(np.int64) - 100)
    assert IdsCodec().encode(one.raw, one.dtype, one.shape).size == HEADER.size + width * 1000


@pytest.mark.parametrize(("dtype", "top"), [("int64", 2**32), ("int32", 2**24)])
def test_ids_decline_a_range_that_gains_nothing(dtype, top):
    one = buffer(np.linspace(0, top, 1000).astype(dtype))
    assert IdsCodec().encode(one.raw, one.dtype, one.shape) is None


@pytest.mark.parametrize("spread", [1000, 1 << 40])
@pytest.mark.parametrize(("distinct", "by_dictionary"), [(128, True), (300, False)])
def test_few_distinct_ids_are_a_dictionary(spread, distinct, by_dictionary):
    values = np.arange(6000) % distinct * spread - 5
    data = IdsCodec().encode(flat(values), "int64", values.shape)
    if by_dictionary:
        assert data.size == HEADER.size + 8 * distinct + values.size
    else:
        assert data is None or data.size > 2 * values.size


@pytest.mark.parametrize(
    ("header", "body", "what"),
    [
        ((5, 0, 0), b"\0" * 20, "width 5"),
        ((2, 3, 0), b"\0" * 32, "width 2 with 3 entries"),
        ((1, 300, 0), b"\0" * 2404, "300 entries"),
        ((1, 1, 0), struct.pack("<q", 9) + b"\0\0\1\0", "beyond the dictionary"),
        ((1, 1, 0), struct.pack("<q", 2**31) + b"\0" * 4, "in int32"),
        ((0, 0, 2**31), b"", "in int32"),
        ((1, 0, 2**31 - 3), b"\0\0\0\3", "in int32"),
        ((1, 0, -(2**31) - 1), b"\1\1\1\1", "in int32"),
        ((3, 0, 0), b"\0" * 11, "11 bytes for 4 values"),
    ],
)
def test_ids_that_no_encoder_wrote(header, body, what):
    with pytest.raises(CorruptDataError, match=what):
        IdsCodec().decode(HEADER.pack(*header) + body, "int32", (4,), np.empty(16, np.uint8))


def test_a_header_of_the_shuffle_that_lies_never_reaches_the_library(monkeypatch):
    values = np.arange(4096).astype(np.int32)
    codec, data = ZstdCodec(), ZstdCodec().encode(flat(values), "int32", (4096,))
    monkeypatch.setattr(blosc(), "decompress", None)  # calling it would be a TypeError
    for offset, value in [(0, 9), (2, 0x21), (3, 8), (4, 1 << 30), (8, 0), (8, 1 << 30), (8, 4094), (12, 1 << 30)]:
        broken = data.copy()
        if offset < 4:
            broken[offset] = value
        else:
            broken[offset : offset + 4] = np.frombuffer(struct.pack("<I", value), np.uint8)
        with pytest.raises(CorruptDataError):
            codec.decode(broken, "int32", (4096,), np.empty(values.nbytes, np.uint8))


def test_the_shuffle_uses_no_threads_of_its_own():
    ZstdCodec()
    assert blosc().use_threads is False


def test_bfloat16_ties_go_to_even():
    tie = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8], np.float32)
    assert bfloat16(tie).tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e38])
def test_int8_scales_that_no_encoder_wrote(scale):
    data = flat(np.array([1.0] * 15 + [scale], np.float32)).tobytes() + b"\1" * 128
    with pytest.raises(CorruptDataError, match="scale"):
        Int8Codec().decode(data, "float32", (8, 16), np.empty(512, np.uint8))


def test_without_its_library_a_codec_is_absent_and_the_reason_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "numcodecs", None)
    blosc.cache_clear()
    compressor, out = Compressor(), np.empty(16, np.uint8)
    assert set(compressor.codecs) == {"ids", "int8", "mulaw"}
    with pytest.raises(CodecMissingError, match=r"'shuffle_zstd' is not available: .*pip install .*numcodecs"):
        compressor.decompress("shuffle_zstd", b"", "int64", (2,), out)
    with pytest.raises(CodecMissingError, match="'opus' is unknown; known are ids, "):
        compressor.decompress("opus", b"", "int64", (2,), out)

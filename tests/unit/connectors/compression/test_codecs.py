"""What the suite over all codecs cannot say: forms, refusals and libraries."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

from tests.support.buffers import bfloat16, buffer, flat, hidden_states, tone
from vllm_omni_sched.config.errors import CodecMissingError, CorruptDataError
from vllm_omni_sched.connectors.compression import audio
from vllm_omni_sched.connectors.compression import shuffle as shuffle_module
from vllm_omni_sched.connectors.compression.audio import FlacCodec, MuLawCodec
from vllm_omni_sched.connectors.compression.codec import Kind, kind_of
from vllm_omni_sched.connectors.compression.ids import HEADER, IdsCodec
from vllm_omni_sched.connectors.compression.quantised import Fp8Codec, Int8Codec
from vllm_omni_sched.connectors.compression.registry import CODECS, load_codecs
from vllm_omni_sched.connectors.compression.shuffle import Lz4Codec, blosc


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
    codec, data = Lz4Codec(), Lz4Codec().encode(flat(values), "int32", (4096,))
    monkeypatch.setattr(blosc(), "decompress", None)  # calling it would be a TypeError
    for offset, value in [(0, 9), (2, 0x81), (3, 8), (4, 1 << 30), (8, 0), (8, 1 << 30), (8, 4094), (12, 1 << 30)]:
        broken = data.copy()
        if offset < 4:
            broken[offset] = value
        else:
            broken[offset : offset + 4] = np.frombuffer(struct.pack("<I", value), np.uint8)
        with pytest.raises(CorruptDataError):
            codec.decode(broken, "int32", (4096,), np.empty(values.nbytes, np.uint8))


def test_the_shuffle_uses_no_threads_of_its_own():
    Lz4Codec()
    assert blosc().use_threads is False


def test_flac_takes_floats_only_if_they_are_int16():
    pcm = (tone() / np.float32(32768)).astype(np.float32)
    codec = FlacCodec()
    assert codec.encode(flat(pcm), "float32", pcm.shape) is not None
    for bad in (pcm[7] + np.float32(1e-5), np.float32(1.0), np.float32(-0.0), np.float32(3e38)):
        other = pcm.copy()
        other[1234] = bad
        assert codec.encode(flat(other), "float32", other.shape) is None


def test_flac_reads_no_other_format():
    with pytest.raises(CorruptDataError, match="fLaC"):
        FlacCodec().decode(b"RIFF" + b"\0" * 100, "int16", (4,), np.empty(8, np.uint8))


@pytest.mark.parametrize("worst", [1.0001, -1.0001, 40.0])
def test_mulaw_declines_what_is_beyond_full_scale(worst):
    assert MuLawCodec().encode(flat(np.array([0.5, worst], np.float32)), "float32", (2,)) is None
    assert MuLawCodec().encode(flat(np.array([-1.0, 1.0], np.float32)), "float32", (2,)) is not None


def test_int8_is_exact_where_fp8_is_not_and_the_other_way_round():
    states = hidden_states(256, 64)
    wide = np.exp(np.random.default_rng(0).normal(0, 1.5, (256, 64))).astype(np.float32)  # within each channel

    def off(codec, values):
        out = np.empty(values.nbytes, np.uint8)
        codec.decode(codec.encode(flat(values), "float32", values.shape), "float32", values.shape, out)
        return float(np.median(np.abs(out.view(np.float32).reshape(values.shape) / values - 1)))

    assert off(Int8Codec(), states) < off(Fp8Codec(), states) < 0.04
    assert off(Fp8Codec(), wide) < 0.04 < off(Int8Codec(), wide)


def test_bfloat16_ties_go_to_even():
    tie = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8], np.float32)
    assert bfloat16(tie).tolist() == [0x3F80, 0x3F82, 0x3F81, 0xBF80]


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e38])
def test_int8_scales_that_no_encoder_wrote(scale):
    data = flat(np.array([1.0, scale], np.float32)).tobytes() + b"\1" * 16
    with pytest.raises(CorruptDataError, match="scale"):
        Int8Codec().decode(data, "float32", (8, 2), np.empty(64, np.uint8))


@pytest.mark.parametrize("data", [b"\x7f" + b"\1" * 16, b"\x80" + b"\1" * 16, b"\0" + b"\x7f" * 16])
def test_fp8_data_that_no_encoder_wrote(data):
    with pytest.raises(CorruptDataError):
        Fp8Codec().decode(data, "float32", (8, 2), np.empty(64, np.uint8))


@pytest.mark.parametrize(
    ("dtype", "shape", "kind"),
    [
        ("int64", (5,), Kind.IDS),
        ("int32", (5, 5), Kind.IDS),
        ("int16", (16_000,), Kind.AUDIO),
        ("bfloat16", (3, 2048), Kind.FEATURES),
        ("float32", (1, 8, 16), Kind.FEATURES),
        ("float32", (16_000,), Kind.OTHER),
        ("float32", (16_000, 2), Kind.OTHER),
        ("uint8", (224, 224), Kind.OTHER),
        ("bool", (7,), Kind.OTHER),
    ],
)
def test_kinds_are_guessed_with_care(dtype, shape, kind):
    assert kind_of(dtype, shape) is kind


def test_without_the_libraries_their_codecs_are_absent_and_the_reason_is_said(monkeypatch):
    for module in ("numcodecs", "soundfile"):
        monkeypatch.setitem(sys.modules, module, None)
    shuffle_module.blosc.cache_clear()
    audio.soundfile.cache_clear()
    codecs = load_codecs()
    assert set(codecs.absent) == {"shuffle_lz4", "shuffle_zstd", "flac"}
    assert {*codecs.present, *codecs.absent} == {codec.name for codec in CODECS}
    with pytest.raises(CodecMissingError, match=r"'flac' is not available: .*soundfile.*pip install .*soundfile"):
        codecs.get("flac")
    with pytest.raises(CodecMissingError, match="'opus' is unknown; known are ids, "):
        codecs.get("opus")

"""Compression over all types, shapes and values: what comes back, how far off, and what the decision is."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.support.buffers import error_limit, flat, numbers
from vllm_omni_sched.config.errors import CorruptDataError
from vllm_omni_sched.connectors.compression.codec import FLOATS, ITEM_BYTES, bfloat16_bits, num_bytes, to_float32
from vllm_omni_sched.connectors.compression.compressor import CODECS
from vllm_omni_sched.connectors.compression.lossy import Int8Codec, MuLawCodec

checked = settings(deadline=None, max_examples=60)

BELOW_MAX = float(np.float32(3.3e38))  # neighbours are finite too
ABOVE_ZERO = 2.0**-120
ALL = tuple(codec() for codec in CODECS)
LOSSLESS = tuple(codec for codec in ALL if not codec.lossy)
shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)
dtypes = st.sampled_from(sorted(ITEM_BYTES))
floats = st.sampled_from(sorted(FLOATS))


@st.composite
def raw_buffers(draw: st.DrawFn) -> tuple[np.ndarray, str, tuple[int, ...]]:
    """Draw any bits, with NaN, infinities and -0.0 among them; some with few distinct values."""
    dtype, shape = draw(dtypes), draw(shapes)
    size = num_bytes(dtype, shape)
    if draw(st.booleans()):
        return np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8), dtype, shape
    item = ITEM_BYTES[dtype]
    few = draw(st.lists(st.binary(min_size=item, max_size=item), min_size=1, max_size=3))
    chosen = draw(st.lists(st.sampled_from(few), min_size=size // item, max_size=size // item))
    return np.frombuffer(b"".join(chosen), np.uint8), dtype, shape


@checked
@given(raw_buffers())
def test_lossless_codecs_give_back_the_same_bits(one):
    raw, dtype, shape = one
    for codec in LOSSLESS:
        if codec.suits(dtype, shape) and (data := codec.encode(raw, dtype, shape)) is not None:
            out = np.empty_like(raw)
            codec.decode(data, dtype, shape, out)
            assert np.array_equal(out, raw), codec.name


@checked
@given(
    st.sampled_from(["int32", "int64"]),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.integers(0, 2**33)),
    st.booleans(),
)
@example("int64", -(2**63), [0, 2**32 - 1], False)
@example("int32", -(2**31), [0, 2**32 - 1], False)
@example("int64", 2**63 - 1, [0], False)
@example("int64", -5, [0, 2**24, 2**16 + 3], True)
def test_ids_of_any_range(dtype, low, offsets, repeat):
    bounds = np.iinfo(dtype)
    low = max(low, int(bounds.min))
    values = np.array([min(low + o, int(bounds.max)) for o in offsets], dtype)
    values = np.repeat(values, 300) if repeat else values
    ids = ALL[0]
    data = ids.encode(flat(values), dtype, values.shape)
    if data is None:
        assert int(values.max()) - int(values.min()) >= 2 ** (32 if dtype == "int64" else 24)
        return
    out = np.empty(values.nbytes, np.uint8)
    ids.decode(data, dtype, values.shape, out)
    assert np.array_equal(out, flat(values))


@st.composite
def features(draw: st.DrawFn) -> tuple[np.ndarray, str, tuple[int, ...]]:
    """Draw finite numbers of one type and any magnitude, in rows."""
    dtype = draw(floats)
    shape = (draw(st.integers(8, 12)), draw(st.integers(16, 20)))
    form = FLOATS[dtype]
    magnitudes = draw(arrays.arrays(form.bits, shape, elements=st.integers(0, form.infinity - 1)))
    if draw(st.booleans()):  # of like magnitude
        magnitudes = (magnitudes % max(1, form.infinity // 64) + form.infinity // 2).astype(form.bits)
    signs = draw(arrays.arrays(np.bool_, shape)).astype(form.bits)
    return flat(magnitudes | signs * np.array(form.magnitude + 1, form.bits)), dtype, shape


def errors(codec, raw, dtype, shape):
    """Values, and how far off each comes back."""
    data = codec.encode(raw, dtype, shape)
    assert data is not None
    out = np.empty_like(raw)
    codec.decode(data, dtype, shape, out)
    values, back = numbers(raw, dtype), numbers(out, dtype)
    assert np.isfinite(back).all()
    return values.reshape(shape), np.abs(back - values).reshape(shape)


@checked
@given(features())
def test_int8_keeps_its_bound_in_every_channel(one):
    codec = Int8Codec()
    values, error = errors(codec, *one)
    assert (error <= error_limit(codec, values, one[1], one[2]).reshape(one[2])).all()


def test_mulaw_over_all_of_int16():
    everything = np.arange(-32768, 32768).astype(np.int16)
    codec = MuLawCodec()
    values, error = errors(codec, flat(everything), "int16", everything.shape)
    limit = error_limit(codec, values, "int16", everything.shape)
    assert (error <= limit).all()
    assert (error / limit).max() > 0.8  # the bound is not much wider than it has to be


@checked
@given(arrays.arrays(np.float32, (20,), elements=st.floats(ABOVE_ZERO, BELOW_MAX, width=32)))
def test_bfloat16_is_the_nearest(values):
    bits = bfloat16_bits(values)
    found = to_float32(bits, "bfloat16").astype(np.float64)
    for step in (-1, 1):
        neighbour = to_float32((bits.astype(np.int32) + step).astype(np.uint16), "bfloat16").astype(np.float64)
        assert (np.abs(neighbour - values) >= np.abs(found - values)).all()
    assert np.array_equal(bfloat16_bits(-values), bits | 0x8000)


@checked
@given(raw_buffers(), st.sampled_from(ALL), st.binary(max_size=80))
def test_decoding_anything_raises_our_error_or_fills_out(one, codec, data):
    raw, dtype, shape = one
    out = np.empty_like(raw)
    with suppress(CorruptDataError):
        codec.decode(data, dtype, shape, out)


@checked
@given(raw_buffers(), st.sampled_from(ALL), st.data())
def test_decoding_damaged_data_raises_our_error_or_fills_out(one, codec, data):
    raw, dtype, shape = one
    if not codec.suits(dtype, shape) or (good := codec.encode(raw, dtype, shape)) is None or not good.size:
        return
    broken = good.copy()
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, broken.size - 1))] = data.draw(st.integers(0, 255))
    broken = broken[: data.draw(st.integers(0, broken.size))] if data.draw(st.booleans()) else broken
    around = np.full(raw.size + 32, 0xA5, np.uint8)
    with suppress(CorruptDataError):
        codec.decode(broken, dtype, shape, around[16:-16])
    assert (around[:16] == 0xA5).all()
    assert (around[-16:] == 0xA5).all()

"""Compression over all types, shapes and values: what comes back, how far off, and what the decision is."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.support.buffers import buffer, flat, numbers
from vllm_omni_sched.config.errors import CorruptDataError
from vllm_omni_sched.connectors.compression.audio import MuLawCodec
from vllm_omni_sched.connectors.compression.decide import (
    OVERHEAD_SECONDS,
    Candidate,
    Measured,
    Reason,
    Snapshot,
    decide,
    sample,
)
from vllm_omni_sched.connectors.compression.dtypes import FLOATS, ITEM_BYTES, bfloat16_bits, num_bytes, to_float32
from vllm_omni_sched.connectors.compression.options import Mode
from vllm_omni_sched.connectors.compression.quantised import NUMBERS, Fp8Codec, Int8Codec
from vllm_omni_sched.connectors.compression.registry import CODECS

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
    shape = (draw(st.integers(8, 12)), draw(st.integers(1, 6)))
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
    assert (error <= codec.error_bound(one[1]).limit(values, np.abs(values).max(axis=0))).all()


@checked
@given(features())
def test_fp8_keeps_its_bound(one):
    codec = Fp8Codec()
    values, error = errors(codec, *one)
    assert (error <= codec.error_bound(one[1]).limit(values, float(np.abs(values).max()))).all()


@checked
@given(arrays.arrays(np.float32, (40,), elements=st.floats(-1, 1, width=32)))
def test_mulaw_keeps_its_bound(pcm):
    codec = MuLawCodec()
    for values, peak in ((pcm, 1.0), (np.clip(np.rint(pcm * 32768), -32768, 32767).astype(np.int16), 32768.0)):
        dtype = str(values.dtype)
        found, error = errors(codec, flat(values), dtype, values.shape)
        assert (error <= codec.error_bound(dtype).limit(found, peak)).all()


def test_mulaw_over_all_of_int16():
    everything = np.arange(-32768, 32768).astype(np.int16)
    codec = MuLawCodec()
    values, error = errors(codec, flat(everything), "int16", everything.shape)
    limit = codec.error_bound("int16").limit(values, 32768.0)
    assert (error <= limit).all()
    assert (error / limit).max() > 0.8  # the bound is not much wider than it has to be


def test_fp8_rounds_to_the_nearest_number_over_all_of_float16():
    everything = np.arange(1 << 16).astype(np.uint16)
    everything = everything[(everything & 0x7FFF) < FLOATS["float16"].infinity]
    scale = 2.0**8  # 65504 / 448, rounded up to a power of two
    values, error = errors(Fp8Codec(), flat(everything), "float16", everything.shape)
    nearest = np.abs(np.abs(values)[:, None] - np.minimum(NUMBERS * scale, 65504)).min(axis=1)
    assert np.array_equal(error, nearest)


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


per_byte = st.floats(1e-12, 1e-6)
candidates = st.lists(
    st.builds(
        Candidate,
        st.sampled_from("abcd"),
        st.booleans(),
        st.builds(Measured, st.floats(0.01, 1.2), per_byte, per_byte),
    ),
    max_size=4,
    unique_by=lambda one: one.codec,
).map(tuple)


@checked
@given(candidates, st.integers(1, 1 << 30), st.floats(1e6, 1e12), st.sampled_from([None, "a", "b"]))
def test_the_decision_is_the_inequality(found, num_bytes, link, lossy):
    plan = decide(Snapshot(num_bytes, link, found, lossy=lossy))
    seconds = {
        one.codec: num_bytes * (one.measured.encode_seconds_per_byte + one.measured.decode_seconds_per_byte)
        + num_bytes * one.measured.size_fraction / link
        + OVERHEAD_SECONDS
        for one in found
        if (not one.lossy or one.codec == lossy) and one.measured.size_fraction < 1
    }
    best = min(seconds.values(), default=math.inf)
    raw = num_bytes / link
    if math.isclose(best, raw, rel_tol=1e-9):
        return
    if best < raw:
        assert plan.reason is Reason.PAYS
        assert math.isclose(seconds[plan.codec], best)
    else:
        assert plan.codec is None
        assert plan.reason in (Reason.LINK_FASTER, Reason.DOES_NOT_SHRINK, Reason.NO_CODEC, Reason.LOSSY_NOT_ALLOWED)


@checked
@given(candidates, st.integers(0, 1 << 30), st.sampled_from([None, 1e6, 1e9]), st.sampled_from(Mode), st.booleans())
def test_no_lossy_codec_is_ever_chosen_or_probed_unless_it_is_named(found, num_bytes, link, mode, due):
    plan = decide(Snapshot(num_bytes, link, found, mode, probe_due=due))
    lossless = {one.codec for one in found if not one.lossy}
    assert {plan.codec, *plan.probe} - {None} <= lossless


@checked
@given(raw_buffers(), st.integers(1, 200))
def test_a_sample_is_whole_rows_from_within(one, sample_bytes):
    raw, dtype, shape = one
    part, part_shape = sample(raw, dtype, shape, sample_bytes)
    assert part.size == num_bytes(dtype, part_shape) <= raw.size
    assert raw.size == 0 or part.size > 0
    buffer(part, "uint8")
    if part.size:
        start = part.ctypes.data - raw.ctypes.data
        row = ITEM_BYTES[dtype] * (shape[-1] if len(shape) >= 2 else 1)
        assert start % row == 0
        assert abs((raw.size - part.size) / 2 - start) <= row

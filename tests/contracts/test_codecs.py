"""One suite over all codecs: what comes back, what is refused, and what corrupted data does."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import pytest

from tests.support.buffers import buffer, error_limit, flat, large_samples, numbers, samples
from vllm_omni_sched.config.errors import CorruptDataError
from vllm_omni_sched.connectors.compression.codec import ITEM_BYTES, Codec, num_bytes
from vllm_omni_sched.connectors.compression.compressor import CODECS, Buffer

SAMPLES = samples()
SHRINK = {  # at least so much, of what the codec is for
    ("ids", "int64 ids"): 2.6,
    ("ids", "int32 ids"): 1.3,
    ("ids", "few ids"): 7.0,
    ("ids", "one id"): 100.0,
    ("shuffle_zstd", "int64 ids"): 4.0,
    ("shuffle_zstd", "bfloat16"): 1.01,
    ("shuffle_zstd", "picture"): 2.0,
    ("mulaw", "int16 PCM"): 2.0,
    ("int8", "bfloat16"): 1.8,
    ("int8", "float32"): 3.5,
}


@pytest.fixture(params=CODECS, ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param()


def of_codec(codec: Codec, samples: dict[str, Buffer] = SAMPLES) -> dict[str, Buffer]:
    """The samples it takes and does not decline."""
    taken = {name: one for name, one in samples.items() if codec.suits(one.dtype, one.shape)}
    return {name: one for name, one in taken.items() if codec.encode(one.raw, one.dtype, one.shape) is not None}


def encoded(codec: Codec, one: Buffer) -> np.ndarray:
    data = codec.encode(one.raw, one.dtype, one.shape)
    assert data is not None
    return data


def decoded(codec: Codec, data: np.ndarray | bytes, one: Buffer) -> np.ndarray:
    """Into the middle of a larger array, whose other bytes have to stay as they are."""
    around = np.full(one.raw.size + 64, 0xA5, np.uint8)
    try:
        codec.decode(data, one.dtype, one.shape, around[32:-32])
    finally:
        assert (around[:32] == 0xA5).all()
        assert (around[-32:] == 0xA5).all()
    return around[32:-32]


def test_names_are_unique():
    assert len({codec.name for codec in CODECS}) == len(CODECS)


def test_what_went_in_comes_out(codec: Codec) -> None:
    taken = of_codec(codec, SAMPLES | large_samples())
    assert taken
    for name, one in taken.items():
        before = one.raw.copy()
        data = encoded(codec, one)
        out = decoded(codec, data, one)
        assert np.array_equal(one.raw, before), name
        if not codec.lossy:
            assert np.array_equal(out, one.raw), name
            continue
        values = numbers(one.raw, one.dtype)
        limit = error_limit(codec, values, one.dtype, one.shape)
        assert (np.abs(numbers(out, one.dtype) - values) <= limit).all(), name
        assert limit.mean() < 0.1 * np.abs(values).max()  # and the bound says something


def test_it_shrinks_what_it_is_for(codec: Codec) -> None:
    taken = of_codec(codec)
    ratios = {(codec.name, name): one.raw.size / encoded(codec, one).size for name, one in taken.items()}
    wanted = {key: least for key, least in SHRINK.items() if key[0] == codec.name}
    assert wanted
    assert {key: ratios[key] for key, least in wanted.items() if ratios[key] < least} == {}


def test_what_is_empty_takes_nothing(codec: Codec) -> None:
    taken = 0
    for dtype in ITEM_BYTES:
        for shape in [(0,), (0, 64), (64, 0, 16), (9, 0)]:
            if codec.suits(dtype, shape):
                one = Buffer(np.empty(0, np.uint8), dtype, shape)
                assert encoded(codec, one).size == 0
                assert decoded(codec, b"", one).size == 0
                with pytest.raises(CorruptDataError):
                    decoded(codec, b"x", one)
                taken += 1
    assert taken or codec.name == "int8"  # which takes 16 channels or more


def test_it_reads_any_bytes_like(codec: Codec) -> None:
    one = next(iter(of_codec(codec).values()))
    data = encoded(codec, one)
    first = decoded(codec, data, one)
    unaligned = np.concatenate([np.zeros(3, np.uint8), data])[3:]
    for other in (data.tobytes(), bytearray(data.tobytes()), memoryview(data.tobytes()), unaligned):
        assert np.array_equal(decoded(codec, other, one), first)


def test_buffers_may_lie_anywhere(codec: Codec) -> None:
    for name, one in of_codec(codec).items():
        unaligned = np.concatenate([np.zeros(1, np.uint8), one.raw])[1:]
        data = codec.encode(unaligned, one.dtype, one.shape)
        assert data is not None
        assert np.array_equal(data, encoded(codec, one)), name
        out = np.empty(one.raw.size + 1, np.uint8)[1:]
        codec.decode(data, one.dtype, one.shape, out)
        assert np.array_equal(out, decoded(codec, data, one)), name


def test_no_other_size_is_taken_for_its_data(codec: Codec) -> None:
    for name, one in of_codec(codec).items():
        data = encoded(codec, one)
        for cut in (data[:-1], data[: data.size // 2], data[:1], data[:0], np.append(data, np.uint8(0))):
            with pytest.raises(CorruptDataError, match=f"codec {codec.name}"):
                decoded(codec, cut, one)
        longer = (one.shape[0] * 2, *one.shape[1:])
        if (codec.name, name) != ("ids", "one id"):  # any number of equal ids is as many bytes
            with pytest.raises(CorruptDataError):
                codec.decode(data, one.dtype, longer, np.empty(num_bytes(one.dtype, longer), np.uint8))


def test_data_of_another_codec_does_no_harm(codec: Codec) -> None:
    for one in of_codec(codec).values():
        for other in (other() for other in CODECS if other is not type(codec)):
            if other.suits(one.dtype, one.shape) and (data := other.encode(one.raw, one.dtype, one.shape)) is not None:
                with suppress(CorruptDataError):
                    decoded(codec, data, one)


def test_flipped_and_random_bytes_raise_our_error_or_nothing(codec: Codec) -> None:
    rng = np.random.default_rng(11)
    refused = 0
    for one in of_codec(codec).values():
        data = encoded(codec, one)
        for trial in range(40):
            broken = data.copy()
            where = rng.integers(0, min(broken.size, 32 if trial % 2 else broken.size), 1 + trial % 4)
            broken[where] = rng.integers(0, 256, where.size)
            if trial % 5 == 0:
                broken = rng.integers(0, 256, int(rng.integers(0, 200)), np.uint8)
            try:
                decoded(codec, broken, one)
            except CorruptDataError:
                refused += 1
    assert refused


def test_mistakes_of_the_caller_are_value_errors(codec: Codec) -> None:
    one = next(iter(of_codec(codec).values()))
    with pytest.raises(ValueError, match="bytes, got"):
        codec.encode(one.raw[:-1], one.dtype, one.shape)
    with pytest.raises(ValueError, match="flat contiguous"):
        codec.encode(one.raw.reshape(2, -1), one.dtype, one.shape)
    with pytest.raises(ValueError, match="flat contiguous"):
        codec.encode(np.repeat(one.raw, 2)[::2], one.dtype, one.shape)
    with pytest.raises(ValueError, match="bytes, got"):
        codec.decode(b"", one.dtype, one.shape, np.empty(one.raw.size + 1, np.uint8))
    locked = np.empty(one.raw.size, np.uint8)
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="writeable"):
        codec.decode(encoded(codec, one), one.dtype, one.shape, locked)
    with pytest.raises(ValueError, match="dtype must be one of"):
        codec.encode(one.raw, "int3", one.shape)


def test_it_keeps_to_the_types_it_takes(codec: Codec) -> None:
    refused = [one for one in SAMPLES.values() if not codec.suits(one.dtype, one.shape)]
    assert refused or codec.name.startswith("shuffle")
    for one in refused:
        with pytest.raises(ValueError, match="does not take"):
            codec.encode(one.raw, one.dtype, one.shape)
        with pytest.raises(CorruptDataError, match="never holds"):
            codec.decode(b"", one.dtype, one.shape, np.empty_like(one.raw))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_lossy_codecs_decline_what_is_not_finite(codec: Codec, bad: float) -> None:
    for dtype in ("float32", "float16"):
        values = np.ones((16, 16), dtype)
        values[3, 5] = bad
        one = buffer(values)
        if codec.suits(one.dtype, one.shape):
            data = codec.encode(one.raw, one.dtype, one.shape)
            assert (data is None) is codec.lossy
            if data is not None:
                assert np.array_equal(decoded(codec, data, one), flat(values))

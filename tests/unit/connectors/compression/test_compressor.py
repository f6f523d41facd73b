"""The compressor sends each buffer raw or encoded: tests of the codecs that it tries, counts and caches."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from tests.support.buffers import bfloat16, buffer, flat, hidden_states, samples, tone
from vllm_omni_sched.config.errors import CorruptDataError
from vllm_omni_sched.connectors.compression import compressor as module
from vllm_omni_sched.connectors.compression.codec import Codec
from vllm_omni_sched.connectors.compression.compressor import (
    OVERHEAD_SECONDS,
    RAW,
    TRY_AGAIN,
    Buffer,
    CompressionCache,
    Compressor,
    pays,
)
from vllm_omni_sched.connectors.compression.lossless import ZstdCodec
from vllm_omni_sched.connectors.compression.options import CompressionOptions

SLOW_LINK = 1e6  # bytes/s
KEY = (b"a", "uint8", (1,), "ids")


class Halver(Codec):
    """Halves zeros, keeps other values, and declines 255."""

    name, seconds_per_byte = "halver", 1e-9

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return True

    def _encode(self, raw, dtype, shape):
        self.encoded.append(raw.size)
        if raw.max() == 255:
            return None
        return raw[::2].copy() if raw.max() == 0 else raw

    def _decode(self, data, dtype, shape, out):
        out[:] = 0


def made(**options) -> Compressor:
    return Compressor(CompressionOptions.model_validate({"min_bytes": 1, **options}))


@pytest.fixture
def with_halver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CODECS", (Halver,))

    def with_options(**options):
        compressor = made(**options)
        return compressor, compressor.codecs["halver"].encoded

    return with_options


def filled(value: int, size: int = 100_000) -> Buffer:
    return buffer(np.full(size, value, np.uint8))


def one(compressor, item, link=SLOW_LINK, edge="0->1"):
    (packed,) = compressor.compress(edge, [item], link)
    return packed


def test_what_is_sent_is_what_is_received():
    compressor = made(mode="always")
    found = samples()
    packed = compressor.compress("0->1", list(found.values()), SLOW_LINK)
    for item, sent in zip(found.values(), packed, strict=True):
        out = np.empty_like(item.raw)
        compressor.decompress(sent.codec, sent.data.tobytes(), item.dtype, item.shape, out)
        assert np.array_equal(out, item.raw)
        assert sent.data.size <= item.raw.size
    assert {sent.codec for sent in packed} >= {"ids", "shuffle_zstd"}


def test_nothing_is_touched_on_shared_memory_when_small_or_when_off(with_halver):
    compressor, encoded = with_halver(min_bytes=500, edges={"0->2": {"mode": "off"}})
    for item, link, edge in (
        (filled(0), None, "0->1"),
        (filled(0, 499), SLOW_LINK, "0->1"),
        (filled(0), SLOW_LINK, "0->2"),
    ):
        packed = one(compressor, item, link, edge)
        assert packed.codec == RAW
        assert packed.data is item.raw
        assert compressor.sends_raw(edge, item.raw.size, link)
    assert encoded == []
    assert not compressor.sends_raw("0->1", 500, SLOW_LINK)
    assert compressor.facts()["raw_bytes"] == compressor.facts()["packed_bytes"] == 2 * 200_499


@pytest.mark.parametrize(("link", "codec"), [(0.95e8, "shuffle_zstd"), (1.4e8, RAW)])
def test_a_buffer_is_compressed_if_that_takes_less_time(link, codec):
    """Halving a megabyte saves 5 ms at 100 MB/s, and costs 3.3 and 0.5."""
    compressor = made(min_bytes=0)
    nbytes, zstd = 1_000_000, ZstdCodec()
    assert pays(nbytes, 0.5, zstd, link) is (0.5 * nbytes / link > nbytes * zstd.seconds_per_byte + OVERHEAD_SECONDS)
    half = buffer(np.random.default_rng(0).integers(0, 16, nbytes, np.uint8))
    found = [one(compressor, half, link) for _ in range(2)]
    assert found[1].codec == codec


def test_what_a_buffer_has_shrunk_to_is_expected_of_the_next_until_it_is_tried_again(with_halver):
    compressor, encoded = with_halver()
    assert one(compressor, filled(0), 2e8).codec == RAW  # to send nothing would save 0.5 ms, as much as it costs
    assert encoded == []
    link = 1e8  # all would save 1 ms, and half of it is less than the 0.6 ms that it costs
    assert one(compressor, filled(0), link).codec == "halver"
    assert [one(compressor, filled(0), link).codec for _ in range(TRY_AGAIN - 2)] == [RAW] * (TRY_AGAIN - 2)
    assert len(encoded) == 1
    one(compressor, filled(0), link)
    one(compressor, filled(0), link, "0->2")  # an edge of its own
    assert len(encoded) == 3


@pytest.mark.parametrize("value", [7, 255])
def test_what_does_not_shrink_or_is_declined_goes_raw(with_halver, value):
    item = filled(value)
    for options in ({}, {"mode": "always"}):
        packed = one(with_halver(**options)[0], item)
        assert packed.codec == RAW
        assert packed.data is item.raw


def test_one_item_to_several_consumers_is_compressed_once(with_halver):
    compressor, encoded = with_halver(cache_bytes=1 << 20)
    first = one(compressor, filled(0))
    for edge in ("0->1", "0->2"):
        assert np.array_equal(one(compressor, filled(0), edge=edge).data, first.data)
    assert len(encoded) == 1
    facts = compressor.facts()
    assert (facts["cache_hits"], facts["cache_misses"]) == (2, 1)
    assert (facts["raw_bytes"], facts["packed_bytes"]) == (300_000, 150_000)


def test_the_least_recently_used_goes_from_the_cache_and_the_bound_holds():
    cache, keys = CompressionCache(30), [(name, *KEY[1:]) for name in (b"a", b"b", b"c", b"d")]
    for key in keys[:3]:
        cache.put(key, np.zeros(10, np.uint8))
    assert cache.get(keys[0]) is not None
    cache.put(keys[3], np.zeros(15, np.uint8))
    assert [key for key in keys if cache.get(key) is not None] == [keys[0], keys[3]]
    assert cache.num_bytes == 25
    cache.put(keys[1], np.zeros(31, np.uint8))
    assert cache.get(keys[1]) is None
    with pytest.raises(ValueError, match="read-only"):
        cache.get(keys[0])[0] = 1


def test_lossy_only_on_the_edge_that_allows_it_and_never_silently(caplog):
    with caplog.at_level(logging.WARNING):
        compressor = made(mode="always", edges={"0->1": {"lossy": "int8"}, "0->2": {"lossy": "mulaw"}})
    assert [record.message for record in caplog.records] == [
        "Edge 0->1 may be compressed lossily by codec int8",
        "Edge 0->2 may be compressed lossily by codec mulaw",
    ]
    states, pcm = buffer(bfloat16(hidden_states(512, 64)), "bfloat16"), buffer(tone(40_000))
    for edge, expected in (("0->1", {"int8"}), ("0->2", {"mulaw"}), ("1->2", set())):
        packed = compressor.compress(edge, [states, pcm], None)
        assert {one.codec for one in packed} & {"int8", "mulaw"} == expected


def test_receiving_what_is_wrong():
    compressor, out = made(), np.empty(16, np.uint8)
    with pytest.raises(CorruptDataError, match="16 bytes, got 15"):
        compressor.decompress(RAW, b"\0" * 15, "int64", (2,), out)
    with pytest.raises(ValueError, match="bytes, got 16"):
        compressor.decompress(RAW, b"\0" * 16, "int64", (3,), out)
    compressor.decompress(RAW, bytes(range(16)), "int64", (2,), out)
    assert np.array_equal(out, np.arange(16))


def test_a_buffer_is_checked():
    with pytest.raises(ValueError, match="bytes, got"):
        Buffer(flat(np.arange(3)), "int64", (4,))

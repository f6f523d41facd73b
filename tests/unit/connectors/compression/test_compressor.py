"""The facade: what goes out for each buffer, what is learnt, counted and cached."""

from __future__ import annotations

import logging
from types import MappingProxyType

import numpy as np
import pytest

from tests.support.buffers import bfloat16, buffer, flat, hidden_states, samples, tone
from vllm_omni_sched.config.errors import CodecMissingError, CorruptDataError
from vllm_omni_sched.connectors.compression.codec import Codec, Kind
from vllm_omni_sched.connectors.compression.compressor import RAW, Buffer, Compressor
from vllm_omni_sched.connectors.compression.decide import Reason
from vllm_omni_sched.connectors.compression.options import CompressionOptions
from vllm_omni_sched.connectors.compression.registry import Codecs

SLOW_LINK, FAST_LINK = 1e6, 1e15  # bytes/s
IDS = buffer(np.arange(20_000) % 999)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Halver(Codec):
    """Halves zeros, and takes as long as it is told."""

    name = "halver"

    def __init__(self, clock: Clock, seconds_per_byte: float = 1e-9) -> None:
        self.clock, self.seconds_per_byte = clock, seconds_per_byte
        self.encoded: list[int] = []

    def takes(self, dtype: str, shape: tuple[int, ...]) -> bool:
        return True

    def _encode(self, raw, dtype, shape):
        self.clock.now += raw.size * self.seconds_per_byte
        self.encoded.append(raw.size)
        if raw.max() == 255:
            return None
        return raw[::2].copy() if raw.max() == 0 else raw

    def _decode(self, data, dtype, shape, out):
        self.clock.now += out.size * self.seconds_per_byte
        out[:] = 0


def with_halver(**options):
    clock = Clock()
    halver = Halver(clock)
    codecs = Codecs(MappingProxyType({"halver": halver}), MappingProxyType({}))
    return Compressor(
        CompressionOptions.model_validate({"min_bytes": 1, **options}), clock=clock, codecs=codecs
    ), halver


def filled(value: int, size: int = 100_000) -> Buffer:
    return buffer(np.full(size, value, np.uint8))


def one(compressor, item, link=SLOW_LINK, edge="0->1"):
    (packed,) = compressor.compress(edge, [item], link)
    return packed


def test_what_is_sent_is_what_is_received():
    compressor = Compressor(CompressionOptions.model_validate({"min_bytes": 0, "mode": "always"}))
    found = samples()
    packed = compressor.compress("0->1", list(found.values()), SLOW_LINK)
    for item, sent in zip(found.values(), packed, strict=True):
        out = np.empty_like(item.raw)
        compressor.decompress(sent.codec, sent.data.tobytes(), sent.dtype, sent.shape, out)
        assert np.array_equal(out, item.raw)
        assert sent.error_bound is None
        assert sent.data.size <= item.raw.size
    assert len({sent.codec for sent in packed} - {RAW}) > 1


def test_nothing_is_touched_on_shared_memory():
    compressor, halver = with_halver()
    item = filled(0)
    packed = one(compressor, item, link=None)
    assert (packed.codec, packed.reason, halver.encoded) == (RAW, Reason.SHARED_MEMORY, [])
    assert packed.data is item.raw


def test_what_is_raw_anyway_is_counted_without_being_looked_at():
    compressor, _ = with_halver(min_bytes=500, edges={"0->2": {"mode": "off"}})
    assert compressor.sends_raw("0->1", 499, SLOW_LINK)
    assert compressor.sends_raw("0->2", 100_000, SLOW_LINK)
    assert compressor.sends_raw("0->1", 100_000, None)
    assert not compressor.sends_raw("0->1", 500, SLOW_LINK)
    counts = compressor.counts()
    assert (counts.raw_bytes, counts.sent_bytes) == (200_499, 200_499)


def test_a_sample_first_then_the_buffer_then_no_more_samples():
    compressor, halver = with_halver(probe_bytes=1024)
    assert one(compressor, filled(0)).reason is Reason.PAYS
    assert halver.encoded == [1024, 1024, 100_000]
    one(compressor, filled(0))
    assert halver.encoded[3:] == [100_000]
    one(compressor, filled(0), edge="0->2")
    assert halver.encoded[4:] == [1024, 1024, 100_000]


def test_a_fast_link_is_not_slowed_and_is_probed_again_by_and_by():
    compressor, halver = with_halver(probe_bytes=1024, reprobe_every=4)
    reasons = [one(compressor, filled(0), FAST_LINK).reason for _ in range(9)]
    assert set(reasons) == {Reason.LINK_FASTER}
    assert halver.encoded == [1024] * 6  # at the first, the fifth and the ninth


def test_the_decision_follows_the_speed_that_is_measured():
    compressor, halver = with_halver(probe_bytes=1024, reprobe_every=1000)
    link = 50e6  # 10 ns/byte are saved
    assert one(compressor, filled(0), link).reason is Reason.PAYS
    halver.seconds_per_byte = 50e-9
    assert Reason.LINK_FASTER in [one(compressor, filled(0), link).reason for _ in range(5)]


def test_what_does_not_shrink_or_is_declined_goes_raw_although_the_sample_promised():
    compressor, _ = with_halver(probe_bytes=1024)
    for value, reason in ((7, Reason.DOES_NOT_SHRINK), (255, Reason.DECLINED)):
        raw = np.zeros(100_000, np.uint8)
        raw[0] = value
        packed = one(compressor, buffer(raw))
        assert (packed.codec, packed.reason) == (RAW, reason)
        assert np.array_equal(packed.data, raw)


def test_small_off_and_bad_links():
    compressor, _ = with_halver(min_bytes=500, edges={"0->2": {"mode": "off"}})
    assert one(compressor, filled(0, 499)).reason is Reason.TOO_SMALL
    assert one(compressor, filled(0), edge="0->2").reason is Reason.OFF
    for link in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="link_bytes_per_second"):
            one(compressor, filled(0), link)


def test_one_item_to_several_consumers_is_compressed_once():
    compressor, halver = with_halver(probe_bytes=1024, cache_bytes=1 << 20)
    first = one(compressor, filled(0))
    before = len(halver.encoded)
    for _ in range(2):
        assert np.array_equal(one(compressor, filled(0)).data, first.data)
    assert len(halver.encoded) == before
    third = one(compressor, filled(0), edge="0->3")  # a sample for the new edge, and no more
    assert halver.encoded[before:] == [1024, 1024]
    assert np.array_equal(third.data, first.data)
    counts = compressor.counts().cache
    assert (counts.hits, counts.misses) == (3, 1)


def test_a_name_of_the_content_stands_for_it():
    compressor, halver = with_halver(cache_bytes=1 << 20)
    item = Buffer(np.zeros(100_000, np.uint8), "uint8", (100_000,), content_key="image-1/stage-0")
    one(compressor, item)
    before = len(halver.encoded)
    one(compressor, item)
    assert len(halver.encoded) == before
    other = Buffer(item.raw, "uint8", (100_000,), content_key="image-2/stage-0")
    one(compressor, other)
    assert len(halver.encoded) == before + 1


def test_lossy_only_on_the_edge_that_allows_it_and_never_silently(caplog):
    with caplog.at_level(logging.WARNING):
        compressor = Compressor(
            CompressionOptions.model_validate(
                {"min_bytes": 1, "mode": "always", "edges": {"0->1": {"lossy": "int8"}, "0->2": {"lossy": "mulaw"}}}
            )
        )
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "Edge 0->1 may be compressed lossily by codec int8",
        "Edge 0->2 may be compressed lossily by codec mulaw",
    ]
    states = buffer(bfloat16(hidden_states(512, 64)), "bfloat16")
    pcm = buffer(tone(40_000), kind=Kind.AUDIO)
    for edge, expected in (("0->1", {"int8"}), ("0->2", {"mulaw"}), ("1->2", set())):
        packed = compressor.compress(edge, [states, pcm], None)  # with 'always': what shrinks most
        assert {one.codec for one in packed} & {"int8", "fp8", "mulaw"} == expected
        assert all((one.error_bound is not None) is (one.codec in expected) for one in packed)


def test_float_pcm_is_audio_only_when_its_owner_says_so():
    compressor = Compressor(
        CompressionOptions.model_validate({"min_bytes": 1, "mode": "always", "edges": {"0->1": {"lossy": "mulaw"}}})
    )
    pcm = np.random.default_rng(0).uniform(-1, 1, 30_000).astype(np.float32)
    assert one(compressor, buffer(pcm), None).codec != "mulaw"
    assert one(compressor, buffer(pcm, kind=Kind.AUDIO), None).codec == "mulaw"


def test_counts():
    compressor, _ = with_halver()
    one(compressor, filled(0))
    one(compressor, filled(0), FAST_LINK)
    one(compressor, filled(0), None)
    counts = compressor.counts()
    assert counts.buffers == {
        (Kind.OTHER, "halver", Reason.PAYS): 1,
        (Kind.OTHER, RAW, Reason.LINK_FASTER): 1,
        (Kind.OTHER, RAW, Reason.SHARED_MEMORY): 1,
    }
    assert (counts.raw_bytes, counts.sent_bytes) == (300_000, 250_000)


def test_receiving_what_is_wrong():
    compressor, out = Compressor(CompressionOptions.model_validate({})), np.empty(16, np.uint8)
    with pytest.raises(CodecMissingError, match="opus"):
        compressor.decompress("opus", b"", "int64", (2,), out)
    with pytest.raises(CorruptDataError, match="16 bytes, got 15"):
        compressor.decompress(RAW, b"\0" * 15, "int64", (2,), out)
    with pytest.raises(ValueError, match="bytes, got 16"):
        compressor.decompress(RAW, b"\0" * 16, "int64", (3,), out)
    compressor.decompress(RAW, bytes(range(16)), "int64", (2,), out)
    assert np.array_equal(out, np.arange(16))


def test_a_buffer_is_checked():
    with pytest.raises(ValueError, match="bytes, got"):
        Buffer(flat(np.arange(3)), "int64", (4,))

"""Decoding through a module with PyNvVideoCodec's interface: the frames, and every way in which it can fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.nvcodec import Failure, HostDevice, NvCodec, Unsupported, indexed, pieces, plain, video
from vllm_omni_sched.config.errors import DecoderError
from vllm_omni_sched.video.decoders.nvdec.decoder import NvdecDecoder
from vllm_omni_sched.video.decoders.nvdec.library import Library, NvdecError
from vllm_omni_sched.video.decoders.nvdec.limits import Refusal
from vllm_omni_sched.video.facts import Order

WANTED = [0, 7, 15, 16, 31, 47]
BFRAMES = "bf=2 g=16 keyint_min=16 sc_threshold=0"


def decoder(module: NvCodec, **options: Any) -> NvdecDecoder:
    return NvdecDecoder(library=Library(module), device=HostDevice(), **options)


def refused(module: NvCodec, data: bytes, **changes: Any) -> Refusal:
    index, packets = indexed(data, **changes)
    with pytest.raises(NvdecError) as raised:
        decoder(module).open(index, packets, memoryview(bytearray(64 * 48 * 3)))
    assert isinstance(raised.value, DecoderError)
    assert str(raised.value).startswith(f"nvdec: {raised.value.reason.value}: ")
    return raised.value.reason


@pytest.mark.parametrize(
    ("codec", "container", "options"),
    [
        ("libx264", "mp4", BFRAMES),
        ("libx264", "mpegts", BFRAMES),
        ("libx264", "matroska", "bf=0 g=16"),
        ("libx265", "mp4", "x265-params=keyint=16:no-open-gop=1:log-level=none"),
        ("libvpx-vp9", "webm", "deadline=realtime cpu-used=8"),
        ("libsvtav1", "mp4", "preset=12"),
    ],
)
def test_frames_are_those_of_a_plain_decode(codec: str, container: str, options: str) -> None:
    data = video(codec, container, options=options)
    index, packets = indexed(data)
    room = bytearray(len(WANTED) * 64 * 48 * 3)
    card = decoder(NvCodec())
    card.open(index, packets, memoryview(room))
    results = [card.decode(piece) for piece in pieces(index, WANTED)]
    card.close()
    shown = list(plain(data).values())
    assert np.array_equal(np.frombuffer(room, np.uint8).reshape(-1, 48, 64, 3), [shown[n] for n in WANTED])
    assert sorted(slot for result in results for slot in result.found) == list(range(len(WANTED)))
    assert sum(result.decoded for result in results) == 48
    assert not any(result.damaged for result in results)
    assert sum(result.bytes_written for result in results) == len(room)


@pytest.mark.parametrize("colours", ["colorspace=bt709 color_range=tv", "colorspace=smpte170m color_range=pc"])
def test_colours_are_what_the_stream_says_they_are(colours: str) -> None:
    data = video(options=f"{BFRAMES} {colours}")
    index, packets = indexed(data)
    room = bytearray(64 * 48 * 3)
    card = decoder(NvCodec())
    card.open(index, packets, memoryview(room))
    card.decode(pieces(index, [5])[0])
    made, usual = np.frombuffer(room, np.uint8).reshape(48, 64, 3), list(plain(video(options=BFRAMES)).values())[5]
    assert np.array_equal(made, list(plain(data).values())[5])
    assert not np.array_equal(made, usual)


def test_a_video_whose_first_frame_cannot_be_decoded_is_refused() -> None:
    index, packets = indexed(video(options=BFRAMES))
    with pytest.raises(NvdecError, match="first frame cannot be decoded") as raised:
        decoder(NvCodec()).open(index, memoryview(bytes(len(packets))), memoryview(b""))
    assert raised.value.reason is Refusal.FAILED


@pytest.mark.parametrize(("degrees", "turns"), [(90, -1), (180, 2), (270, 1)])
def test_rotated_videos_come_upright(degrees: int, turns: int) -> None:
    data = video(options=BFRAMES)
    index, packets = indexed(data, rotation=degrees)
    room = bytearray(64 * 48 * 3)
    card = decoder(NvCodec())
    card.open(index, packets, memoryview(room))
    card.decode(pieces(index, [5])[0])
    upright = np.rot90(list(plain(data).values())[5], turns)
    assert np.array_equal(np.frombuffer(room, np.uint8).reshape(upright.shape), upright)


def test_in_sequence_frames_are_counted() -> None:
    data = video(options=BFRAMES)
    index, packets = indexed(data)
    room = bytearray(64 * 48 * 3)
    card = decoder(NvCodec())
    card.open(index, packets, memoryview(room))
    (piece,) = (p for p in pieces(index, [9], Order.SEQUENCE) if p.wanted)
    assert card.decode(piece).found == (0,)
    assert np.array_equal(np.frombuffer(room, np.uint8).reshape(48, 64, 3), list(plain(data).values())[9])


def test_a_session_serves_videos_of_its_kind_and_no_other() -> None:
    module = NvCodec()
    card = decoder(module)
    index, packets = indexed(video(options=BFRAMES))
    room = memoryview(bytearray(64 * 48 * 3))
    for _ in range(3):
        card.open(index, packets, room)
        card.decode(pieces(index, [2])[0])
    assert module.created == 1
    card.open(*indexed(video("libsvtav1", options="preset=12")), room)
    assert module.created == 2


def test_what_a_cpu_would_decode_otherwise_is_refused() -> None:
    module, data = NvCodec(), video(options=BFRAMES)
    assert refused(module, data, codec="mpeg4") is Refusal.CODEC
    assert refused(module, data, pixel_format="yuv420p10le") is Refusal.FORMAT
    assert refused(module, data, width=63) is Refusal.FORMAT
    assert refused(module, data, extradata_changes=((16, b""),)) is Refusal.CHANGES
    assert refused(module, video(options=f"{BFRAMES} x264-params=tff=1:log-level=none")) is Refusal.INTERLACED
    for hdr in ("colorprim=bt2020", "transfer=arib-std-b67"):
        assert refused(module, video(options=f"{BFRAMES} x264-params={hdr}:log-level=none")) is Refusal.FORMAT
    assert refused(module, data, extradata=b"\x01\x64\x00\x1f\xff\xe1\x00\x40") is Refusal.FAILED
    assert module.created == 0


def test_what_the_card_cannot_do_is_refused_by_what_it_says() -> None:
    data = video(options=BFRAMES)
    assert refused(NvCodec(supported=0), data) is Refusal.CODEC
    assert refused(NvCodec(width_max=62), data) is Refusal.SIZE
    assert refused(NvCodec(height_min=50), data) is Refusal.SIZE
    assert refused(NvCodec(mb_num_max=11), data) is Refusal.SIZE


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (Failure("cuvidCreateDecoder returned error 2: CUDA_ERROR_OUT_OF_MEMORY"), Refusal.BUSY),
        (
            Failure("HandleVideoSequence : \nError code : 2\nError Type : cuvidCreateDecoder() returned error 2"),
            Refusal.BUSY,
        ),
        (Failure("HandleVideoSequence : \nError code : 209\nError Type : returned error 209"), Refusal.FAILED),
        (Unsupported("Codec not supported on this GPU"), Refusal.CODEC),
        (Failure("CUDA_ERROR_UNKNOWN"), Refusal.FAILED),
        (RuntimeError("no such thing"), Refusal.FAILED),
    ],
)
def test_a_session_that_cannot_be_had_is_known_at_open(failure: Exception, reason: Refusal) -> None:
    assert refused(NvCodec(1, failure), video(options=BFRAMES)) is reason


def test_a_gpu_that_is_not_there_is_refused() -> None:
    index, packets = indexed(video(options=BFRAMES))
    with pytest.raises(NvdecError, match="Invalid gpu id 5") as raised:
        decoder(NvCodec(), gpu=5).open(index, packets, memoryview(b""))
    assert raised.value.reason is Refusal.NO_DEVICE


def test_a_library_that_gives_up_in_the_middle_costs_its_session() -> None:
    module = NvCodec(fails_at=12)
    index, packets = indexed(video(options=BFRAMES))
    card = decoder(module)
    card.open(index, packets, memoryview(bytearray(64 * 48 * 3)))
    (first, *_) = pieces(index, [15])
    with pytest.raises(NvdecError) as raised:
        card.decode(first)
    assert raised.value.reason is Refusal.FAILED
    assert card.decode(first).found == (0,)
    assert module.created == 2


def test_frames_that_do_not_come_are_an_error() -> None:
    index, packets = indexed(video(options=BFRAMES))
    card = decoder(NvCodec())
    card.open(index, packets, memoryview(bytearray(64 * 48 * 3)))
    (first, *_) = pieces(index, [15])
    short = type(first)(0, first.feed[:4], first.wanted, first.order, 1.0)
    with pytest.raises(NvdecError, match="1 of 1 frames are missing") as raised:
        card.decode(short)
    assert raised.value.reason is Refusal.INCOMPLETE


def test_nothing_is_decoded_after_close() -> None:
    index, packets = indexed(video(options=BFRAMES))
    card = decoder(NvCodec())
    card.open(index, packets, memoryview(bytearray(64 * 48 * 3)))
    card.close()
    card.close()
    with pytest.raises(ValueError, match="not open"):
        card.decode(pieces(index, [2])[0])

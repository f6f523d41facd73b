"""NVDEC's decoder with NVIDIA's own library in Python, over the double of the driver: frames to the bit, and limits.

FFmpeg decodes below the library, so that what is compared is everything else: packets, order, slots, colours, streams,
and what is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.cuda_double import control, video
from tests.support.nvcodec import indexed, pieces, plain
from tests.support.nvcodec import video as encoded
from tests.support.until import until
from vllm_omni_sched.video.decoders.nvdec.decoder import NvdecDecoder
from vllm_omni_sched.video.decoders.nvdec.device import Device
from vllm_omni_sched.video.decoders.nvdec.library import Library, NvdecError, gpus_of_engines
from vllm_omni_sched.video.decoders.nvdec.limits import Refusal
from vllm_omni_sched.video.facts import Order
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool.kinds import DecoderKind, cpu_kind
from vllm_omni_sched.video.results import Observer
from vllm_omni_sched.video.sandbox.seccomp import Profile
from vllm_omni_sched.video.service import FlashCodec

WANTED = [0, 7, 15, 16, 31, 47]
BFRAMES = "bf=2 g=16 keyint_min=16 sc_threshold=0"
FRAME_BYTES = 64 * 48 * 3


@pytest.fixture(autouse=True)
def small_frames() -> Iterator[None]:
    """Devices that decode the small frames of these tests."""
    video.set_up()
    before = {codec: video.get_limits(codec) for codec in video.CODECS}
    video.small_frames()
    yield
    video.fail_at(0)
    for codec, limits in before.items():
        video.set_limits(codec, limits)


def decoded(data: bytes, wanted: list[int], gpu: int = 0, order: Order = Order.PTS, **changes: Any) -> Any:
    """Return the wanted frames of a video, decoded by a decoder of its own."""
    index, packets = indexed(data, **changes)
    room = bytearray(len(wanted) * FRAME_BYTES)
    decoder = NvdecDecoder(gpu)
    decoder.open(index, packets, memoryview(room))
    for piece in pieces(index, wanted, order):
        decoder.decode(piece)
    decoder.close()
    shape = (64, 48) if index.rotation in (90, 270) else (48, 64)
    return np.frombuffer(room, np.uint8).reshape(-1, *shape, 3)


def frames_of(data: bytes, wanted: list[int]) -> Any:
    shown = list(plain(data).values())
    return [shown[number] for number in wanted]


def refused(data: bytes, gpu: int = 0, **changes: Any) -> Refusal:
    index, packets = indexed(data, **changes)
    with pytest.raises(NvdecError) as raised:
        NvdecDecoder(gpu).open(index, packets, memoryview(bytearray(FRAME_BYTES)))
    return raised.value.reason


@pytest.mark.parametrize("gpu", [0, 1])
@pytest.mark.parametrize(
    ("codec", "container", "options"),
    [
        ("libx264", "mp4", BFRAMES),
        ("libx264", "mpegts", BFRAMES),
        ("libx265", "mp4", "x265-params=keyint=16:no-open-gop=1:log-level=none"),
        ("libvpx-vp9", "webm", "deadline=realtime cpu-used=8"),
        ("libsvtav1", "mp4", "preset=12"),
    ],
)
def test_frames_are_those_of_a_plain_decode(codec: str, container: str, options: str, gpu: int) -> None:
    data = encoded(codec, container, options=options)
    before = video.counts()
    assert np.array_equal(decoded(data, WANTED, gpu), frames_of(data, WANTED))
    after = video.counts()
    assert after.created == before.created + 1
    assert after.mapped >= before.mapped + 48


@pytest.mark.parametrize("colours", ["colorspace=bt709 color_range=tv", "colorspace=smpte170m color_range=pc"])
def test_colours_are_what_the_stream_says_they_are(colours: str) -> None:
    data = encoded(options=f"{BFRAMES} {colours}")
    made = decoded(data, [5])
    assert np.array_equal(made, frames_of(data, [5]))
    assert not np.array_equal(made, frames_of(encoded(options=BFRAMES), [5]))


@pytest.mark.parametrize(("degrees", "turns"), [(90, -1), (180, 2), (270, 1)])
def test_rotated_videos_come_upright(degrees: int, turns: int) -> None:
    data = encoded(options=BFRAMES)
    made = decoded(data, [5], rotation=degrees)
    assert np.array_equal(made[0], np.rot90(frames_of(data, [5])[0], turns))


def test_in_sequence_frames_are_counted() -> None:
    data = encoded(options=BFRAMES)
    index, packets = indexed(data)
    room = bytearray(FRAME_BYTES)
    decoder = NvdecDecoder()
    decoder.open(index, packets, memoryview(room))
    (piece,) = (piece for piece in pieces(index, [9], Order.SEQUENCE) if piece.wanted)
    assert decoder.decode(piece).found == (0,)
    assert np.array_equal(np.frombuffer(room, np.uint8).reshape(48, 64, 3), frames_of(data, [9])[0])


def test_what_a_device_says_of_itself() -> None:
    library = Library()
    limits = library.limits(1, "h264", "yuv420p")
    assert (limits.supported, limits.engines, limits.max_width) == (True, 2, 4096)
    assert gpus_of_engines() == [0, 1, 0, 1]
    assert gpus_of_engines(at_most=1) == [0, 1]
    with video.limits(video.H264, engines=3):
        assert gpus_of_engines() == [0, 1, 0, 1, 0, 1]


def test_what_a_device_cannot_decode_is_refused_by_what_it_says() -> None:
    data = encoded(options=BFRAMES)
    with video.limits(video.H264, supported=0):
        assert refused(data) is Refusal.CODEC
    with video.limits(video.H264, max_width=62):
        assert refused(data) is Refusal.SIZE
    with video.limits(video.H264, min_height=50):
        assert refused(data) is Refusal.SIZE
    with video.limits(video.H264, macroblocks=11):
        assert refused(data) is Refusal.SIZE
    assert refused(data, gpu=5) is Refusal.NO_DEVICE
    assert refused(data, pixel_format="yuv420p10le") is Refusal.FORMAT


def test_a_device_without_memory_is_busy() -> None:
    data = encoded(options=BFRAMES)
    torch.cuda.empty_cache()
    control.set_memory_bound(1 << 10)
    assert refused(data) is Refusal.BUSY
    control.set_memory_bound(256 << 20)
    assert np.array_equal(decoded(data, WANTED), frames_of(data, WANTED))


def test_a_session_serves_videos_of_its_kind_and_its_memory_goes_with_it() -> None:
    data = encoded(options=BFRAMES)
    index, packets = indexed(data)
    room = memoryview(bytearray(FRAME_BYTES))
    before = video.counts()
    decoder = NvdecDecoder()
    for _ in range(3):
        decoder.open(index, packets, room)
        decoder.decode(pieces(index, [2])[0])
    assert video.counts().created == before.created + 1
    decoder.open(*indexed(encoded("libsvtav1", options="preset=12")), room)
    assert video.counts().created == before.created + 2
    decoder.close()
    assert video.counts().open == before.open


def test_an_error_of_the_driver_costs_the_session_alone() -> None:
    data = encoded(options=BFRAMES)
    index, packets = indexed(data)
    decoder = NvdecDecoder()
    decoder.open(index, packets, memoryview(bytearray(FRAME_BYTES)))
    (first, *_) = pieces(index, [15])
    video.fail_at(3)
    with pytest.raises(NvdecError) as raised:
        decoder.decode(first)
    assert raised.value.reason is Refusal.FAILED
    assert decoder.decode(first).found == (0,)


def test_slots_are_written_only_once_the_device_has_finished() -> None:
    data = encoded(options=BFRAMES)
    index, packets = indexed(data)
    room = bytearray(FRAME_BYTES)
    decoder = NvdecDecoder()
    decoder.open(index, packets, memoryview(room))
    (first, *_) = pieces(index, [15])
    results: list[Any] = []
    thread = threading.Thread(target=lambda: (torch.cuda.set_device(0), results.append(decoder.decode(first))))
    with control.holding_all():
        thread.start()
        thread.join(0.2)
        assert not results
    thread.join()
    assert results[0].found == (0,)
    assert np.array_equal(np.frombuffer(room, np.uint8).reshape(48, 64, 3), frames_of(data, [15])[0])


class _NotRecorded(Device):
    """Does not wait for the device: a planted fault."""

    def recorded(self) -> Any:
        return self

    def synchronize(self) -> None: ...


def test_a_missing_wait_is_found() -> None:
    data = encoded(options=BFRAMES)
    index, packets = indexed(data)
    room = bytearray(len(WANTED) * FRAME_BYTES)
    decoder = NvdecDecoder(device=_NotRecorded(0))
    decoder.open(index, packets, memoryview(room))
    for piece in pieces(index, WANTED):
        decoder.decode(piece)
    torch.cuda.synchronize()
    assert not np.array_equal(np.frombuffer(room, np.uint8).reshape(-1, 48, 64, 3), frames_of(data, WANTED))


class _Busiest(Observer):
    def __init__(self) -> None:
        self.most = 0

    def busy(self, decoders: int, of: int) -> None:
        self.most = max(self.most, decoders)


@pytest.mark.parametrize("devices", [(0,), (0, 0), (0, 1)])
def test_engines_of_one_or_several_devices_share_a_video(devices: tuple[int, ...]) -> None:
    options, busiest = VideoOptions(decoders=1), _Busiest()
    cards = DecoderKind("nvdec", "tests.cuda_double.video:card", Profile.DEVICE, devices)
    wanted = list(range(0, 192, 5))
    data = encoded(frames=192, options=BFRAMES)
    with FlashCodec(options, kinds=(cards, cpu_kind(options)), observer=busiest) as codec:

        def all_have_worked() -> bool:
            found = codec.load(data, lambda index: wanted)
            assert found.report.fallbacks == ()
            assert np.array_equal(found.frames, frames_of(data, wanted))
            assert found.report.pieces > len(devices)
            return busiest.most == len(devices)

        until(all_have_worked)  # the process of one may still be starting when that of another has decoded all
        other = codec.load(encoded(pixels="yuv444p", options=BFRAMES), lambda index: WANTED)
        assert set(other.report.fallbacks) == {"decoder_refused"}
        assert np.array_equal(other.frames, frames_of(encoded(pixels="yuv444p", options=BFRAMES), WANTED))

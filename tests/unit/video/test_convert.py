"""Conversion gives what OpenCV gives, and writes nowhere else."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator

import av
import cv2
import numpy as np
import pytest
from av.video.reformatter import Interpolation
from cv2 import videoio_registry

from tests.support import clips
from tests.support.decoding import plain
from vllm_omni_sched.video.decoders import convert
from vllm_omni_sched.video.decoders.convert import Converter

NOT_BY_OPENCV = {
    *("h264_interlaced", "h264_interlaced_decoding_times"),  # which it fails to convert
    *("av1", "av1_mkv"),  # for which it has no decoder
}


def with_opencv(data: bytes) -> list[np.ndarray]:
    backend = next(b for b in videoio_registry.getStreamBufferedBackends() if videoio_registry.hasBackend(b))
    capture = cv2.VideoCapture(io.BytesIO(data), backend, [])
    frames = []
    while True:
        there, frame = capture.read()
        if not there:
            return frames
        frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))


@pytest.mark.parametrize("name", sorted({*clips.SOUND} - NOT_BY_OPENCV))
def test_as_opencv(name: str) -> None:
    theirs = with_opencv(clips.clip(name))
    assert len(theirs) == len(plain(name))
    assert all(np.array_equal(frame, ours) for frame, (_, ours) in zip(theirs, plain(name), strict=True))


COLOURS = {
    "bt709": {"colorspace": 1, "color_range": 1},
    "bt709_full": {"colorspace": 1, "color_range": 2},
    "bt601": {"colorspace": 5, "color_range": 1},
    "bt2020_10_bit": {"colorspace": 9, "color_range": 1, "pixel_format": "yuv420p10le"},
    "full_10_bit": {"colorspace": 1, "color_range": 2, "pixel_format": "yuv420p10le"},
    "pq": {"options": {"x264-params": "colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc"}},
    "hlg_10_bit": {
        "pixel_format": "yuv420p10le",
        "options": {"x264-params": "colorprim=bt2020:transfer=arib-std-b67:colormatrix=bt2020nc"},
    },
    "display_p3": {"options": {"x264-params": "colorprim=smpte432:transfer=bt709:colormatrix=bt709"}},
    "wide_gamut": {"options": {"x264-params": "colorprim=bt2020:transfer=bt709:colormatrix=bt709"}},
    "odd_height": {"encoder": "libvpx-vp9", "container": "webm", "size": (112, 83)},
    "odd_both": {"encoder": "libvpx-vp9", "container": "webm", "size": (107, 83), "colorspace": 1},
    "vp9_full": {"encoder": "libvpx-vp9", "container": "webm", "color_range": 2},
    "444": {"pixel_format": "yuv444p"},
    "422_10_bit": {"pixel_format": "yuv422p10le"},
    "rgb": {"encoder": "libx264rgb", "pixel_format": "rgb24"},
    "rgb_without_codec": {"encoder": "rawvideo", "container": "avi", "pixel_format": "bgr24"},
    "gray": {"pixel_format": "gray"},
    "gray_10_bit": {"encoder": "ffv1", "container": "matroska", "pixel_format": "gray10le"},
    "alpha": {"encoder": "ffv1", "container": "matroska", "pixel_format": "yuva420p"},
    "rgb_with_alpha": {"encoder": "png", "container": "mov", "pixel_format": "rgba"},
    "gif": {"encoder": "gif", "container": "gif", "pixel_format": "rgb8"},
    "packed": {"encoder": "rawvideo", "container": "avi", "pixel_format": "yuyv422"},
    "width_of_16": {"size": (176, 98)},
    "width_of_2": {"size": (178, 98)},
    "narrow": {"size": (18, 34)},
}

ALL_COLOURS = {"hlg_10_bit": "slow", "display_p3": "slow", "wide_gamut": "long", "pq": "long"}
"""Marks of the kinds for which FFmpeg computes a table of all colours, twice three seconds of a processor."""


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Counts the contexts that libswscale has set up since the last call, reconfigured ones too: it logs each."""
    monkeypatch.setattr(convert, "_FLAGS", Interpolation.BICUBIC | Interpolation.PRINT_INFO)
    level = av.logging.get_level()
    av.logging.set_level(av.logging.INFO)
    av.logging.set_skip_repeated(False)
    with av.logging.Capture() as logs:

        def count() -> int:
            made = sum(name == "swscaler" and ("scaler, from" in text or "unscaled" in text) for _, name, text in logs)
            logs.clear()
            return made

        yield count
    av.logging.set_level(level)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[getattr(pytest.mark, mark)] if (mark := ALL_COLOURS.get(name)) else [])
        for name in COLOURS
    ],
)
def test_colours_and_sizes_as_opencv_with_contexts_for_the_first_frame_alone(
    name: str, contexts: Callable[[], int]
) -> None:
    data = clips.encode(frames=4, **COLOURS[name])
    theirs = with_opencv(data)
    with av.open(io.BytesIO(data)) as file:
        frames = list(file.decode(video=0))
    assert len(theirs) == len(frames) == 4
    convert._is_direct(convert._frame_kind(frames[0]))  # checks once per process whether the library is used directly
    converter = Converter()
    slot = np.empty((frames[0].height, frames[0].width, 3), np.uint8)
    contexts()
    converter.convert(frames[0], slot)
    assert np.array_equal(slot, theirs[0])
    assert 1 <= contexts() <= 4
    for frame, expected in zip(frames[1:], theirs[1:], strict=True):
        converter.convert(frame, slot)
        assert np.array_equal(slot, expected)
    converter.end_video()  # the next one is of the same kind
    converter.convert(frames[0], slot)
    assert contexts() == 0


def frame_of(name: str) -> av.VideoFrame:
    with av.open(io.BytesIO(clips.clip(name))) as file:
        return next(file.decode(video=0))


@pytest.mark.parametrize("name", ["h264", "h264_crop", "h264_odd", "h264_10_bit"])
@pytest.mark.parametrize("rotation", [0, 90, 180, 270, 45])
def test_nothing_but_the_slot_is_written(name: str, rotation: int) -> None:
    frame = frame_of(name)
    size = (frame.width, frame.height) if rotation in (90, 270) else (frame.height, frame.width)
    room = np.full((3, *size, 3), 77, np.uint8)
    Converter().convert(frame, room[1], rotation)
    assert (room[0] == 77).all()
    assert (room[2] == 77).all()
    upright = np.empty((frame.height, frame.width, 3), np.uint8)
    Converter().convert(frame, upright)
    turns = {90: -1, 180: 2, 270: 1}.get(rotation, 0)
    assert np.array_equal(room[1], np.rot90(upright, turns))


def test_in_place_where_it_can_be() -> None:
    frame, other = frame_of("h264"), frame_of("h264_crop")
    slot = np.empty((frame.height, frame.width, 3), np.uint8)
    assert Converter().convert(frame, slot) == slot.nbytes
    assert Converter().convert(frame, slot, 180) == 2 * slot.nbytes
    slot = np.empty((other.height, other.width, 3), np.uint8)
    assert Converter().convert(other, slot) == 2 * slot.nbytes


@pytest.mark.parametrize("name", ["h264", "h264_422", "h264_full_range"])
def test_without_the_library_it_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = frame_of(name)
    slots = np.empty((2, frame.height, frame.width, 3), np.uint8)
    Converter().convert(frame, slots[0])
    monkeypatch.setattr(convert, "_is_direct", lambda kind: False)
    assert Converter().convert(frame, slots[1]) == 2 * slots[1].nbytes
    assert np.array_equal(*slots)


def test_a_library_that_converts_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = convert._frame_kind(frame_of("h264"))
    assert convert._is_direct(kind)
    monkeypatch.setattr(convert, "_ONE", 1 << 15)  # half the contrast
    convert._equals_pyav.cache_clear()
    try:
        assert not convert._is_direct(kind)
    finally:
        convert._equals_pyav.cache_clear()


def test_a_frame_of_another_size_is_scaled() -> None:
    frame = frame_of("h264")
    slot = np.zeros((40, 56, 3), np.uint8)
    Converter().convert(frame, slot)
    small = cv2.resize(plain("h264")[0][1], (56, 40), interpolation=cv2.INTER_AREA)
    assert np.abs(slot.astype(int) - small).mean() < 12

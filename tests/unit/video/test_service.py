"""Real videos through real decoder processes: the frames that a plain sequential decode gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("av")

from tests.support import clips
from tests.support.decoding import plain
from vllm_omni_sched.config.errors import VideoInputError, VideoLimitError
from vllm_omni_sched.video.facts import Order, VideoIndex
from vllm_omni_sched.video.frame_order import shown_frames
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.results import DecodedVideo
from vllm_omni_sched.video.service import FlashCodec


@pytest.fixture(scope="module")
def codec() -> Iterator[FlashCodec]:
    with FlashCodec(VideoOptions(decoders=2, nvdec=False)) as codec:
        codec.start()
        yield codec


def all_of(index: VideoIndex) -> range:
    return range(shown_frames(index))


def check(decoded: DecodedVideo, name: str) -> None:
    sound = plain(name)
    assert decoded.indices
    for number, frame, seconds in zip(decoded.indices, decoded.frames, decoded.pts_seconds, strict=True):
        pts, expected = sound[number]
        assert np.array_equal(frame, expected), f"{name}: frame {number}"
        if pts is not None and sound[0][0] is not None:
            numerator, denominator = decoded.index.time_base
            assert seconds == pytest.approx((pts - sound[0][0]) * numerator / denominator)


@pytest.mark.parametrize("name", ["h264_damaged_0", "h264_damaged_2", "hevc_open_gop_damaged_1", "h264_truncated"])
def test_frames_of_damaged_videos_are_those_of_a_plain_decode(codec: FlashCodec, name: str) -> None:
    """Those frames that a plain decoder finds, as it shows them."""
    sound = dict(plain(name))
    decoded = codec.load(clips.clip(name), all_of)
    numerator, denominator = decoded.index.time_base
    first = min(pts for pts in decoded.index.packets["pts"].tolist())
    assert len(decoded.indices) >= len(sound) / 2
    for number, frame, seconds in zip(decoded.indices, decoded.frames, decoded.pts_seconds, strict=True):
        if decoded.index.order is Order.SEQUENCE:
            assert np.array_equal(frame, plain(name)[number][1])
        else:
            assert np.array_equal(frame, sound[first + round(seconds * denominator / numerator)])
    assert decoded.report.used == len(decoded.indices)


def test_a_single_group_of_pictures_gets_all_decoders(codec: FlashCodec) -> None:
    decoded = codec.load(clips.clip("h264_one_gop"), all_of)
    assert decoded.report.pieces == 1
    check(decoded, "h264_one_gop")


@pytest.mark.parametrize("name", list(clips.PLAYLISTS))
def test_a_video_cannot_open_files(codec: FlashCodec, name: str) -> None:
    with pytest.raises(VideoInputError):
        codec.load(clips.PLAYLISTS[name], all_of)


@pytest.mark.parametrize(
    ("option", "allowed"), [("max_pixels", 8959), ("max_frames", 47), ("max_duration_seconds", 1.5)]
)
def test_limits(option: str, allowed: float) -> None:
    options = VideoOptions.model_validate({"decoders": 1, "nvdec": False, option: allowed})
    with FlashCodec(options) as codec, pytest.raises(VideoLimitError, match=option):
        codec.load(clips.clip("h264"), all_of)


def test_too_little_memory_is_not_taken_for_damage() -> None:
    fits = clips.encode(frames=4)
    large = clips.encode(frames=2, size=(5120, 2880), options={"preset": "ultrafast"})
    with FlashCodec(VideoOptions(decoders=1, worker_memory_bytes=128 << 20)) as codec:
        assert codec.load(fits, all_of).indices == [0, 1, 2, 3]  # the least that may be chosen is enough for something
        with pytest.raises(VideoLimitError, match="worker_memory_bytes"):
            codec.load(large, all_of)


def test_importing_it_loads_neither_av_nor_torch_nor_vllm() -> None:
    """Decoding happens elsewhere; and a decoder is small."""
    ask = (
        "import sys; import vllm_omni_sched.video.service; print({'av', 'torch', 'vllm'} & set(sys.modules));"
        "import vllm_omni_sched.video.pool.worker, vllm_omni_sched.video.decoders.pyav, vllm_omni_sched.video.demux;"
        "print({'torch', 'vllm', 'cv2'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=environment, timeout=60)
    assert run.stdout.split("\n") == ["set()", "set()", ""]


@pytest.mark.parametrize("name", ["mpeg4_b_avi", "mpeg2", "h264_raw", "mpeg4_mixed_up"])
def test_recovery_decodes_nothing_again_where_no_more_frames_come(codec: FlashCodec, name: str) -> None:
    cut = clips.clip(name)[: len(clips.clip(name)) * 3 // 5]
    without = codec.load(cut, lambda _: range(0, 48, 2))
    recovered = codec.load(cut, lambda _: range(0, 48, 2), recovery=True)
    assert without.index.order is Order.SEQUENCE
    assert 0 < len(without.indices) < 24
    assert recovered.indices == without.indices
    assert recovered.report.decoded == without.report.decoded


def test_recovery_decodes_each_frame_at_most_once_more(codec: FlashCodec) -> None:
    for name in sorted(clips.BROKEN):
        wanted = range(0, 48, 7)
        without = codec.load(clips.clip(name), lambda _: wanted)  # noqa: B023
        recovered = codec.load(clips.clip(name), lambda _: wanted, recovery=True)  # noqa: B023
        assert recovered.report.decoded <= without.report.decoded + len(without.index.packets), name
        assert len(recovered.indices) >= len(without.indices)

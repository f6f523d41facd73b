"""Frames and metadata are those of vLLM's own loaders, for every rule and kind of video."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from packaging.version import Version
from vllm.multimodal.video import VIDEO_LOADER_REGISTRY
from vllm.multimodal.video_decoders import opencv

from tests.support.clips import BROKEN, SIZE, audio_only, clip, sound_with_cover, zero_frames
from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import RequestError, VideoInputError, VideoLimitError
from vllm_omni_sched.engine.video import service as process_service
from vllm_omni_sched.engine.video.loader import FlashCodecLoader
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.service import FlashCodec

RULES = sorted(
    name for name in VIDEO_LOADER_REGISTRY.name2class if not VIDEO_LOADER_REGISTRY.backend_requires_gpu(name)
)
CLIPS = [
    "h264_open_gop",
    "h264_vfr",
    "h264_trimmed",
    "h264_rotated",
    "h264_crop",
    "h264_10_bit",
    "h264_open_gop_headless",
    "h264_mkv",
    "hevc_open_gop",
    "vp9",
    "mpeg4",
    "h264_avi",
    "mpeg4_avi",
    "h264_audio",
    "wmv_audio",
    "mpeg4_packed",
    "mpeg4_avi_truncated",
    "vp9_mp4_truncated",
]
TARGETS: list[dict[str, Any]] = [{}, {"num_frames": 8}, {"num_frames": -1, "fps": 3}, {"num_frames": 5, "fps": 1}]


@pytest.fixture(scope="module")
def service() -> Iterator[FlashCodec]:
    with FlashCodec(VideoOptions(decoders=2)) as service:
        yield service


def outcome(load: Callable[[], tuple[Any, dict[str, Any]]]) -> tuple[Any, Any]:
    """(frames, metadata), or (None, what was raised)."""
    try:
        frames, metadata = load()
    except (ValueError, ZeroDivisionError, AssertionError, IndexError) as error:
        return None, f"{type(error).__name__}: {error}"
    return np.asarray(frames), metadata


def assert_same(ours: tuple[Any, Any], stock: tuple[Any, Any]) -> None:
    assert ours[1] == stock[1]
    assert (ours[0] is None) == (stock[0] is None)
    if stock[0] is not None:
        assert (ours[0].shape, ours[0].dtype) == (stock[0].shape, stock[0].dtype)
        assert np.array_equal(ours[0], stock[0])


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(service, rule):
    stock = VIDEO_LOADER_REGISTRY.load(rule)
    for name in ("h264_open_gop", "h264_vfr", "h264_trimmed"):
        data = clip(name)
        for target in TARGETS:
            ours = outcome(lambda: FlashCodecLoader(service).load_bytes(data, sampling=rule, **target))  # noqa: B023
            assert_same(ours, outcome(lambda: stock.load_bytes(data, **target)))  # noqa: B023


@pytest.mark.parametrize("name", CLIPS)
def test_every_kind_of_video(service, name):
    data = clip(name)
    for target in TARGETS:
        ours = outcome(lambda: FlashCodecLoader(service).load_bytes(data, **target))  # noqa: B023
        stock = outcome(lambda: VIDEO_LOADER_REGISTRY.load("opencv").load_bytes(data, **target))  # noqa: B023
        assert stock[0] is not None
        assert_same(ours, stock)


def test_of_a_video_that_is_cut_off_there_is_what_was_asked_for(service):
    """Stock samples the 48 frames of the header, and finds those that are there."""
    frames, metadata = FlashCodecLoader(service).load_bytes(clip("h264_mp4_truncated"), num_frames=8)
    _, stock = VIDEO_LOADER_REGISTRY.load("opencv").load_bytes(clip("h264_mp4_truncated"), num_frames=8)
    assert (metadata["total_num_frames"], stock["total_num_frames"]) == (26, 48)
    assert (len(frames), len(stock["frames_indices"])) == (8, 5)


@pytest.mark.parametrize("name", ["h264_mixed_up", "h264_decoding_times", "hevc_decoding_times"])
def test_frames_whose_times_are_out_of_order_are_counted_as_stock_counts_them(service, name):
    for target in TARGETS:
        ours = outcome(lambda: FlashCodecLoader(service).load_bytes(clip(name), **target))  # noqa: B023
        assert_same(ours, outcome(lambda: VIDEO_LOADER_REGISTRY.load("opencv").load_bytes(clip(name), **target)))  # noqa: B023


@pytest.mark.parametrize("name", ["mpeg4_mixed_up", "mpeg4_decoding_times"])
def test_stock_s_look_at_the_end_loses_frames_where_times_are_out_of_order(service, name):
    frames, metadata = FlashCodecLoader(service).load_bytes(clip(name), num_frames=-1)
    stock, told = VIDEO_LOADER_REGISTRY.load("opencv").load_bytes(clip(name), num_frames=-1)
    assert (metadata["total_num_frames"], told["total_num_frames"]) == (48, 46)
    assert np.array_equal(frames[: len(stock)], stock)


def test_sound_with_a_cover_is_one_frame(service):
    """Stock says so, too; but its look at the end of the file loses the picture."""
    frames, metadata = FlashCodecLoader(service).load_bytes(sound_with_cover(), num_frames=32)
    _, stock = VIDEO_LOADER_REGISTRY.load("opencv").load_bytes(sound_with_cover(), num_frames=32)
    assert frames.shape == (1, *SIZE[::-1], 3)
    assert metadata["frames_indices"] == [0]
    assert metadata["total_num_frames"] == 1
    same = ("total_num_frames", "fps", "duration")
    assert {name: metadata[name] for name in same} == {name: stock[name] for name in same}


@pytest.mark.parametrize(
    ("name", "frames", "mended"), [("av1", 40, None), ("one_frame", 1, "0.33"), ("h264_ts", 48, "0.33")]
)
def test_where_opencv_loses_frames_ours_does_not(service, name, frames, mended):
    """It has no AV1 decoder; before 0.33 it did not always find back to the beginning after vLLM looked at the end."""
    wanted = np.linspace(0, frames - 1, min(8, frames), dtype=int).tolist()
    found, metadata = FlashCodecLoader(service).load_bytes(clip(name), num_frames=8)
    assert found.shape == (len(wanted), *SIZE[::-1], 3)
    assert metadata["frames_indices"] == wanted
    _, stock = VIDEO_LOADER_REGISTRY.load("opencv").load_bytes(clip(name), num_frames=8)
    if mended is not None and Version(compat.vllm_version()) >= Version(mended):
        assert stock["frames_indices"] == wanted
    else:
        assert set(stock["frames_indices"]) < set(wanted)
    assert {**stock, "frames_indices": wanted, "do_sample_frames": frames == 1} == metadata


def test_a_video_that_is_cut_off_gives_its_sound_frames(service):
    data = clip("h264_ts")
    whole, _ = FlashCodecLoader(service).load_bytes(data)
    frames, _ = FlashCodecLoader(service).load_bytes(data[: len(data) // 2])
    assert 10 < len(frames) < len(whole)
    assert np.array_equal(frames[:10], whole[:10])


@pytest.mark.parametrize("name", sorted(BROKEN)[::5])
def test_what_is_damaged_is_loaded_with_and_without_recovery(service, name):
    for recovery in (False, True):
        frames, metadata = FlashCodecLoader(service).load_bytes(clip(name), num_frames=8, frame_recovery=recovery)
        assert len(frames) == len(metadata["frames_indices"]) > 0
        assert metadata["frames_indices"] == sorted(set(metadata["frames_indices"]))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"not a video" * 100, "not a readable video"),
        (audio_only, "no video stream"),
        (zero_frames, "has no frames"),
    ],
)
def test_what_is_no_video_is_an_error_of_the_request(service, data, says):
    with pytest.raises(VideoInputError, match=says) as raised:
        FlashCodecLoader(service).load_bytes(data() if callable(data) else data, num_frames=8)
    assert isinstance(raised.value, ValueError)  # which vLLM answers with a 400


def test_vllm_s_limit_of_pixels_holds(service, monkeypatch):
    monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", "1000")
    with pytest.raises(ValueError, match=r"{}x{} .* exceed the maximum of 1000 pixels".format(*SIZE)):
        FlashCodecLoader(service).load_bytes(clip("h264"), num_frames=8)


def test_our_limits_hold():
    with (
        FlashCodec(VideoOptions(decoders=1, max_pixels=1000)) as service,
        pytest.raises(VideoLimitError, match="max_pixels"),
    ):
        FlashCodecLoader(service).load_bytes(clip("h264"), num_frames=8)


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        (
            {"sampling": "opencvv"},
            "sampling is 'opencvv', which is none of vLLM's sampling rules: name one of .*'opencv'",
        ),
        ({"sampling": "omni_flashcodec"}, "none of vLLM's sampling rules"),
        ({"sampling": "pynvvideocodec"}, "none of vLLM's sampling rules"),
        (
            {"backend": "torchcodec"},
            "backend is 'torchcodec', and this server decodes videos by 'omni_flashcodec' alone",
        ),
        ({"device": "cuda"}, "device is 'cuda', and this server"),
        ({"omni_class": "realtime"}, r"a request may name one of \['interactive', 'batch'\]"),
        ({"omni_class": "urgent"}, r"omni_class is 'urgent'; it must be one of \['realtime', 'interactive', 'batch'\]"),
    ],
)
def test_a_request_that_names_what_is_not_there_hears_what_is(service, kwargs, says):
    with pytest.raises(RequestError, match=says):
        FlashCodecLoader(service).load_bytes(clip("h264"), **kwargs)


@pytest.fixture
def fell_back(monkeypatch) -> list[str]:
    reasons: list[str] = []
    monkeypatch.setattr(process_service, "observe_stock", lambda reason: reasons.append(reason.value))
    return reasons


class OwnReader(VIDEO_LOADER_REGISTRY.name2class["opencv"]):
    """A rule of somebody else, which reads frames in a way of its own."""

    @classmethod
    def read_frames(cls, cap, frame_idx, total_frames_num, *, frame_recovery=False):
        frames, valid = super().read_frames(cap, frame_idx, total_frames_num, frame_recovery=frame_recovery)
        return frames[::-1], valid[::-1]


class OwnDecoding:
    """One that decodes by itself."""

    @classmethod
    def load_bytes(cls, data, **kwargs):
        return np.zeros((1, 2, 2, 3), np.uint8), {"frames_indices": [0]}


@pytest.mark.parametrize(("rule", "reason"), [(OwnReader, "own_reader"), (OwnDecoding, "own_decoding")])
def test_a_rule_that_decodes_in_its_own_way_does_so(service, monkeypatch, fell_back, rule, reason):
    monkeypatch.setitem(VIDEO_LOADER_REGISTRY.name2class, "somebody's", rule)
    found = FlashCodecLoader(service).load_bytes(clip("h264"), sampling="somebody's", num_frames=4)
    assert_same(outcome(lambda: found), outcome(lambda: rule.load_bytes(clip("h264"), num_frames=4)))
    assert fell_back == [reason]


def test_a_rule_of_somebody_else_that_only_samples_is_decoded_by_ours(service, monkeypatch, fell_back):
    class Backwards(VIDEO_LOADER_REGISTRY.name2class["opencv"]):
        @classmethod
        def compute_frames_index_to_sample(cls, source, target, **kwargs):
            return [7, 3, 3]

    monkeypatch.setitem(VIDEO_LOADER_REGISTRY.name2class, "somebody's", Backwards)
    ours = FlashCodecLoader(service).load_bytes(clip("h264"), sampling="somebody's")
    assert_same(ours, Backwards.load_bytes(clip("h264")))
    assert ours[1]["frames_indices"] == [3, 7]
    assert fell_back == []


def test_on_other_threads_and_afterwards_vllm_decodes_as_ever(service, monkeypatch):
    FlashCodecLoader(service).load_bytes(clip("h264"), num_frames=2)
    assert opencv.decode_opencv.__wrapped__.__module__ == opencv.__name__
    monkeypatch.setattr(FlashCodec, "load", lambda *_, **__: pytest.fail("ours was asked"))
    frames, _ = VIDEO_LOADER_REGISTRY.load("opencv").load_bytes(clip("h264"), num_frames=2)
    assert len(frames) == 2

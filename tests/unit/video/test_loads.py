"""Which frames a load gives, and what it says of videos that are bad or too large."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import video_actors as actors
from tests.support.acted_codec import check, everything, service
from vllm_omni_sched.config.errors import DecoderError, VideoInputError, VideoLimitError
from vllm_omni_sched.video.load import Fallback
from vllm_omni_sched.video.repair import RepairReason
from vllm_omni_sched.video.service import FlashCodec


@pytest.fixture(scope="module")
def codec() -> Iterator[FlashCodec]:
    with service(deadline_seconds=20.0) as codec:
        yield codec


def test_frames_come_in_order(codec: FlashCodec) -> None:
    seen: list[tuple[int, int]] = []
    decoded = codec.load(actors.video(24), everything, progress=lambda done, of: seen.append((done, of)))
    check(decoded, list(range(24)))
    assert seen[-1] == (24, 24)
    assert seen == sorted(seen)
    assert decoded.report.pieces == len(seen) == 6
    assert decoded.report.used == decoded.report.decoded == 24
    assert set(decoded.report.seconds) == {"index", "wait", "decode", "convert", "assemble"}


def test_only_what_is_wanted_and_each_once(codec: FlashCodec) -> None:
    check(codec.load(actors.video(24), lambda _: [17, 3, 3]), [3, 17])


def test_nothing_wanted(codec: FlashCodec) -> None:
    check(codec.load(actors.video(24), lambda _: []), [])


def test_frames_that_are_not_there(codec: FlashCodec) -> None:
    decoded = codec.load(actors.video(8), lambda _: [6, 7, 8, 900])
    check(decoded, [6, 7])
    assert decoded.report.fallbacks.count(Fallback.MISSING.value) == 2


def test_a_choice_that_raises_is_the_callers(codec: FlashCodec) -> None:
    with pytest.raises(ZeroDivisionError):
        codec.load(actors.video(8), lambda _: [1 // 0])
    check(codec.load(actors.video(8), everything), list(range(8)))


def test_frames_that_do_not_come_out_are_left_out(codec: FlashCodec) -> None:
    decoded = codec.load(actors.video(12, absent=[2, 5]), everything)
    check(decoded, [0, 1, 3, 4, *range(6, 12)])
    assert decoded.report.fallbacks == (RepairReason.MISSING.value, *[Fallback.MISSING.value] * 2)


def test_the_next_frame_stands_in(codec: FlashCodec) -> None:
    decoded = codec.load(actors.video(24, absent=[5, 6, 9, 10, 20]), lambda _: [0, 5, 9, 11, 20], recovery=True)
    check(decoded, [0, 7, 11])  # nothing is left between 9 and 11, and nothing comes after 20
    assert decoded.report.fallbacks.count(Fallback.RECOVERED.value) == 1


def test_standing_in_costs_one_decoding_at_most(codec: FlashCodec) -> None:
    gone = [*range(5, 60), *range(70, 140), *range(150, 230)]
    data = actors.video(240, absent=gone)
    wanted = [0, 5, 62, 75, 149, 151, 239]
    without = codec.load(data, lambda _: wanted)
    decoded = codec.load(data, lambda _: wanted, recovery=True)
    assert without.indices == [0, 62, 149, 239]
    check(decoded, [0, 60, 62, 149, 239])
    assert decoded.report.decoded <= without.report.decoded + 240


def test_no_frame_at_all(codec: FlashCodec) -> None:
    with pytest.raises(VideoInputError, match="none of the 4 wanted frames"):
        codec.load(actors.video(4, absent=[0, 1, 2, 3]), everything)


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        (b"no video", VideoInputError, "no video that can be read"),
        (b"", VideoInputError, "no video that can be read"),
        (actors.video(index="wrong"), DecoderError, "something is wrong"),
        (actors.video(index="die"), VideoInputError, "two decoder processes ended"),
        (actors.video(index="nonsense"), VideoInputError, "is inconsistent"),
        (actors.video(index="greedy"), VideoLimitError, "worker_memory_bytes"),
        (actors.video(greedy=[3]), VideoLimitError, "worker_memory_bytes"),
        (actors.video(4, die=[1]), DecoderError, "none of the 4 wanted frames.* exit code 7"),
        (actors.video(4, wrong=[1]), DecoderError, "none of the 4 wanted frames.*something is wrong"),
        (actors.video(refuse=[3]), DecoderError, "such a thing"),
        (actors.video(refuse_open=[3]), DecoderError, "cannot open"),
    ],
)
def test_bad_videos(codec: FlashCodec, data: bytes, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        codec.load(data, everything)
    check(codec.load(actors.video(8), everything), list(range(8)))


@pytest.mark.parametrize(
    ("option", "value"),
    [("max_input_bytes", 20), ("max_pixels", 47), ("max_frames", 23), ("max_output_bytes", 1 << 20)],
)
def test_limits(option: str, value: int) -> None:
    frames = 24 if option != "max_output_bytes" else 9000
    with service(**{option: value}) as codec, pytest.raises(VideoLimitError, match=option):
        codec.load(actors.video(frames), everything)

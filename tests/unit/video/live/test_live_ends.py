"""Every way in which a stream that is decoded as it arrives can end: damage, limits, silence, death, closing."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest

from tests.support.descriptors import nothing_left_open
from tests.support.live import GOP, PATIENCE, decode, pixels, plain, stream, take
from tests.support.stopping import stop
from vllm_omni_sched.config.errors import (
    ConfigError,
    DecoderError,
    VideoDeadlineError,
    VideoInputError,
    VideoLimitError,
)
from vllm_omni_sched.video.live import LiveVideo
from vllm_omni_sched.video.options import VideoOptions


def test_a_stream_that_breaks_off_gives_what_is_sound(live: Any) -> None:
    sent = stream(container="mpegts")
    one = live()
    one.feed(sent.data[: sent.gop_ends[2] - 500])
    one.end()
    frames = list(one)
    assert 2 * GOP <= len(frames) <= 3 * GOP
    assert np.array_equal(pixels(frames)[: 2 * GOP], plain(sent.data)[: 2 * GOP])


def test_damage_in_the_middle_is_survived(live: Any) -> None:
    sent = stream("matroska")
    data = bytearray(sent.data)
    middle = sent.gop_ends[2] + 500
    data[middle : middle + 600] = b"\x5a" * 600
    one = live()
    frames = decode(one, bytes(data))
    assert len(frames) > 2 * GOP  # FFmpeg guesses at what it does not know
    assert np.array_equal(pixels(frames)[: 2 * GOP], plain(sent.data)[: 2 * GOP])
    assert not np.array_equal(pixels(frames), plain(sent.data))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not a readable video stream"),
        (b"not a video at all " * 4000, "not a readable video stream"),
        (bytes(np.random.default_rng(0).integers(0, 256, 200_000, np.uint8)), "readable video stream|be decoded"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "not a readable video stream"),
    ],
    ids=["nothing", "text", "noise", "playlist"],
)
def test_what_is_no_video_is_said_to_be_none(live: Any, data: bytes, says: str) -> None:
    one = live()
    with pytest.raises(VideoInputError, match=says):
        decode(one, data)
    with pytest.raises(VideoInputError, match=says):
        one.feed(b"more")


def test_frames_larger_than_the_option_allows_are_refused(live: Any) -> None:
    one = live(options=VideoOptions(max_pixels=64 * 48 - 1))
    with pytest.raises(VideoLimitError, match="max_pixels"):
        decode(one, stream().data)


def test_a_ring_larger_than_the_option_allows_is_refused(live: Any) -> None:
    one = live(slots=200, options=VideoOptions(max_output_bytes=1 << 20))
    with pytest.raises(VideoLimitError, match="max_output_bytes"):
        decode(one, stream().data)


def test_a_killed_process_is_an_error_after_the_frames_that_were_there(live: Any) -> None:
    sent = stream(gops=8, width=160)
    one = live(slots=160)
    one.feed(sent.data[: sent.gop_ends[4]])
    before = take(one, 2 * GOP)
    os.kill(one.pid, signal.SIGKILL)
    assert np.array_equal(pixels(before), plain(sent.data)[: 2 * GOP])
    with pytest.raises(DecoderError, match="was killed by SIGKILL"):
        list(one)
    with pytest.raises(DecoderError, match="was killed by SIGKILL"):
        one.feed(b"x" * 100)


def test_silence_has_a_deadline_on_both_sides(live: Any) -> None:
    quiet = live(silence_seconds=0.2)
    with pytest.raises(VideoDeadlineError, match="silence_seconds"):
        list(quiet)
    full = live(slots=2, silence_seconds=1.0)
    with pytest.raises(VideoDeadlineError, match="take frames"):
        full.feed(stream(gops=8, width=320).data * 8)


def test_silence_has_a_deadline_however_short_each_wait_is(live: Any) -> None:
    data, now = stream(gops=8, width=320).data * 8, [0.0]
    one = live(slots=2, silence_seconds=5.0, clock=lambda: now[0])
    stop(one.pid)
    fed = one.feed(data, wait_seconds=0.0)
    assert fed < len(data)
    now[0] = 4.0
    assert one.feed(data[fed:], wait_seconds=0.0) == 0
    assert one.ready() == []
    now[0] = 6.0
    with pytest.raises(VideoDeadlineError, match="silence_seconds"):
        one.ready()
    with pytest.raises(VideoDeadlineError, match="silence_seconds"):
        one.feed(data[fed:], wait_seconds=0.0)


def test_a_frame_given_back_ends_silence(live: Any) -> None:
    data, now = stream(gops=8, width=320).data * 8, [0.0]
    one = live(slots=2, silence_seconds=PATIENCE, clock=lambda: now[0])
    fed = one.feed(data, wait_seconds=0.0)
    held = take(one, 2)
    while more := one.feed(data[fed:], wait_seconds=0.0):
        fed += more
    stop(one.pid)
    now[0] = PATIENCE + 1
    held.clear()
    assert one.ready() == []
    one.feed(data[fed:], wait_seconds=0.0)


def test_a_closed_stream_says_so_to_whoever_waits(live: Any) -> None:
    one = live()
    said: list[str] = []

    def wait() -> None:
        try:
            list(one)
        except DecoderError as error:
            said.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    one.close()
    one.close()
    waiting.join(PATIENCE)
    assert said == ["live video: this stream was closed already"]
    with pytest.raises(DecoderError, match="closed already"):
        one.feed(b"x")


def test_nothing_is_left_behind() -> None:
    def once() -> int:
        with LiveVideo(silence_seconds=PATIENCE) as one:
            one.feed(stream(gops=1).data)
            one.end()
            assert sum(1 for _ in one) == GOP
            return one.pid

    once()
    gc.collect()
    with nothing_left_open():
        pids = [once() for _ in range(3)]
        forgotten = LiveVideo()
        pids.append(forgotten.pid)
        del forgotten
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]


def test_arguments_out_of_range_are_refused() -> None:
    for options, says in (({"slots": 1}, "slots"), ({"slots": 257}, "slots"), ({"silence_seconds": 0}, "silence")):
        with pytest.raises(ConfigError, match=says):
            LiveVideo(**options)

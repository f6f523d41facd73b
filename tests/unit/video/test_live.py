"""Streams that are decoded as they arrive: the frames, when they come, and every way in which a stream can end."""

from __future__ import annotations

import gc
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.descriptors import nothing_left_open
from tests.support.live import GOP, plain, stream
from vllm_omni_sched.errors import ConfigError, DecoderError, VideoDeadlineError, VideoInputError, VideoLimitError
from vllm_omni_sched.video.live import LiveFrame, LiveVideo, Sampling
from vllm_omni_sched.video.live import stream as stream_module
from vllm_omni_sched.video.live.ring import ring_memory
from vllm_omni_sched.video.options import VideoOptions

PATIENCE = 20.0  # of tests that expect something to come; those that do not fail take a second


@pytest.fixture
def live() -> Iterator[Callable[..., LiveVideo]]:
    """Makes streams, and ends them."""
    made: list[LiveVideo] = []

    def make(sampling: Sampling | None = None, **options: Any) -> LiveVideo:
        made.append(LiveVideo(sampling, **{"silence_seconds": PATIENCE, "slots": 80, **options}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def take(live: LiveVideo, count: int) -> list[LiveFrame]:
    """So many, and no more."""
    found = []
    for frame in live:
        found.append(frame)
        if len(found) == count:
            break
    return found


def decode(live: LiveVideo, data: bytes) -> list[LiveFrame]:
    """All frames of a stream that is there."""
    live.feed(data)
    live.end()
    return list(live)


def pixels(frames: list[LiveFrame]) -> list[np.ndarray]:
    return [frame.pixels for frame in frames]


@pytest.mark.parametrize(
    ("container", "codec", "options"),
    [
        ("mpegts", "libx264", "bf=2"),
        ("mp4", "libx264", "bf=2"),
        ("matroska", "libx264", "bf=0"),
        ("webm", "libvpx-vp9", "deadline=realtime cpu-used=8"),
        ("h264", "libx264", "bf=2"),
        ("hevc", "libx265", "x265-params=keyint=16:log-level=none"),
    ],
)
def test_frames_are_those_of_the_whole_file(live: Any, container: str, codec: str, options: str) -> None:
    data = stream(container, codec, options=options).data
    one = live()
    for at in range(0, len(data), 1000):
        assert one.feed(data[at : at + 1000]) == len(data[at : at + 1000])
    one.end()
    frames = list(one)
    assert np.array_equal(pixels(frames), plain(data))
    assert [frame.number for frame in frames] == list(range(4 * GOP))
    times = [frame.pts_seconds for frame in frames]
    assert times == sorted(times)
    assert times[0] == 0.0
    if container not in ("h264", "hevc"):  # these carry no times
        assert np.allclose(np.diff(times), 1 / 30, atol=1e-3)
    assert (one.counts.decoded, one.counts.arrived, one.counts.dropped, one.counts.damaged) == (64, 64, 0, 0)
    assert one.size == (64, 48)


@pytest.mark.parametrize("rotation", [90, 270])
def test_rotated_streams_come_upright(live: Any, rotation: int) -> None:
    data = stream("mp4", gops=1, rotation=rotation).data
    one = live()
    frames = decode(one, data)
    assert one.size == (48, 64)
    assert np.array_equal(pixels(frames), [np.rot90(frame, -rotation // 90) for frame in plain(data)])


@pytest.mark.parametrize("container", ["mpegts", "mp4", "matroska", "h264"])
def test_frames_come_before_the_stream_goes_on(live: Any, container: str) -> None:
    sent = stream(container, gops=8, width=160)
    whole = plain(sent.data)
    one = live(slots=160)
    at = taken = 0
    for k, end in enumerate(sent.gop_ends):
        one.feed(sent.data[at:end])
        at = end
        # what a muxer holds back it has not written yet: one GOP; and one more that a decoder puts in order
        due = max(0, k - 1) * GOP - taken
        if due:
            assert np.array_equal(pixels(take(one, due)), whole[taken : taken + due])
            taken += due
    one.end()
    assert len(list(one)) == len(whole) - taken


def test_every_nth_frame_and_so_many_a_second(live: Any) -> None:
    data = stream().data
    whole = plain(data)
    for sampling, wanted in (
        (Sampling(every=5), range(0, 64, 5)),
        (Sampling(fps=10.0), range(0, 64, 3)),
        (Sampling(fps=4.0), [0, 8, 15, 23, 30, 38, 45, 53, 60]),
    ):
        one = live(sampling)
        frames = decode(one, data)
        assert [frame.number for frame in frames] == list(wanted)
        assert np.array_equal(pixels(frames), [whole[n] for n in wanted])
        assert one.counts.decoded == 64


def test_a_slow_consumer_stops_the_decoder_and_then_the_feeder(live: Any) -> None:
    sent = stream(gops=8, width=320)
    data = sent.data * 6  # more than sockets hold
    one = live(slots=4)
    fed = one.feed(data, wait_seconds=2.0)
    assert fed < len(data)
    assert one.counts.arrived <= 4
    held = take(one, 4)
    assert one.feed(data[fed:], wait_seconds=0.3) < len(data) - fed  # their slots are still in use
    copies = [frame.pixels.copy() for frame in held]
    del held
    (following, *_) = take(one, 1)
    assert following.number == 4
    assert np.array_equal(copies, plain(sent.data)[:4])


def test_frames_are_dropped_only_when_that_was_asked_for(live: Any) -> None:
    data = stream().data
    one = live(slots=3, drop=True)
    one.feed(data)
    one.end()
    held = take(one, 3)
    rest = list(one)
    assert [frame.number for frame in held] == [0, 1, 2]
    assert one.counts.arrived == 3 + len(rest)
    assert one.counts.dropped == 64 - one.counts.arrived
    assert one.counts.dropped > 0


def test_a_frame_stays_what_it_is_while_anybody_looks_at_a_part_of_it(live: Any) -> None:
    data = stream().data
    whole = plain(data)
    one = live(slots=3)
    feeder = threading.Thread(target=lambda: (one.feed(data), one.end()))
    feeder.start()
    corner = take(one, 1)[0].pixels[:8, :8]
    assert sum(1 for _ in one) == 63
    feeder.join()
    assert np.array_equal(corner, whole[0][:8, :8])
    one.close()
    gc.collect()
    assert np.array_equal(corner, whole[0][:8, :8])
    assert not corner.flags.writeable


def test_its_process_cannot_take_the_frames_memory_away(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def memory(nbytes: int) -> int:
        made.append(os.dup(fd := ring_memory(nbytes)))
        return fd

    monkeypatch.setattr(stream_module, "ring_memory", memory)
    one = live()
    frames = decode(one, stream().data)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(made[0], 0)
    finally:
        os.close(made[0])
    assert np.array_equal(pixels(frames), plain(stream().data))


def test_two_streams_at_once(live: Any) -> None:
    first, second = stream(), stream("matroska", width=96)
    ones = live(slots=70), live(slots=70)
    for at in range(0, 60_000, 700):
        for one, sent in zip(ones, (first, second), strict=True):
            one.feed(sent.data[at : at + 700])
    for one, sent in zip(ones, (first, second), strict=True):
        one.end()
        assert np.array_equal(pixels(list(one)), plain(sent.data))


def test_one_thread_feeds_another_takes_and_neither_misses_the_other(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = stream(gops=8, width=320).data
    in_vain = []

    def select_(*arguments: Any) -> Any:
        ready = select.select(*arguments)
        if not any(ready):
            in_vain.append(arguments)
        return ready

    monkeypatch.setattr(stream_module, "select", SimpleNamespace(select=select_))
    one = live(slots=2)

    def feed() -> None:
        for at in range(0, len(data), 5000):
            one.feed(data[at : at + 5000])
        one.end()

    feeder = threading.Thread(target=feed)
    feeder.start()
    assert [frame.number for frame in one] == list(range(128))
    feeder.join()
    assert in_vain == []


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
        (b"", "no video stream that can be read"),
        (b"not a video at all " * 4000, "no video stream that can be read"),
        (bytes(np.random.default_rng(0).integers(0, 256, 200_000, np.uint8)), "can be read|be decoded"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "no video stream that can be read"),
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
    os.kill(one.pid, signal.SIGSTOP)
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
    os.kill(one.pid, signal.SIGSTOP)
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
    assert said == ["live video: it was closed before"]
    with pytest.raises(DecoderError, match="closed before"):
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

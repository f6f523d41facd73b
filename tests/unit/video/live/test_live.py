"""Streams that are decoded as they arrive: which frames come, when, and how long they stay."""

from __future__ import annotations

import gc
import os
import select
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.live import GOP, decode, pixels, plain, stream, take
from vllm_omni_sched.video.live import Sampling
from vllm_omni_sched.video.live import stream as stream_module
from vllm_omni_sched.video.live.ring import ring_memory


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

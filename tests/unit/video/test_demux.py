"""The index of a video, by demuxing alone; and files that are none."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

import av
import numpy as np
import pytest

from tests.support import clips
from tests.support.clips import SOUND, clip
from tests.support.decoding import as_file, video
from tests.support.descriptors import nothing_left_open
from vllm_omni_sched.config.errors import VideoInputError, VideoLimitError
from vllm_omni_sched.video import demux
from vllm_omni_sched.video.demux import read_index
from vllm_omni_sched.video.facts import NO_TIME, Order, PacketFlag, SequenceReason
from vllm_omni_sched.video.frame_order import shown_frames
from vllm_omni_sched.video.options import Limits

NO_LIMITS = {"max_input_bytes": 1 << 40, "max_pixels": 1 << 40, "max_frames": 1 << 40, "max_output_bytes": 1 << 40}
NO_LIMITS["max_duration_seconds"] = 1 << 40


def read(data: bytes, **limits: float) -> None:
    with as_file(data) as fd:
        _, packets_fd = read_index(fd, Limits(**{**NO_LIMITS, **limits}))
        if packets_fd is not None:
            os.close(packets_fd)


@pytest.mark.parametrize("name", SOUND)
def test_packets_are_those_that_a_demuxer_gives(name: str) -> None:
    index, packets = video(name).index, video(name).packets
    with av.open(io.BytesIO(clip(name))) as file:
        found = [packet for packet in file.demux(video=0) if packet.size]
        assert len(found) == len(index.packets)
        for packet, (pts, dts, offset, nbytes, flags) in zip(found, index.packets.tolist(), strict=True):
            assert packets[offset : offset + nbytes] == bytes(packet)
            assert (pts, dts) == tuple(NO_TIME if time is None else time for time in (packet.pts, packet.dts))
            assert bool(flags & PacketFlag.HIDDEN) == packet.is_discard


@pytest.mark.parametrize(
    ("name", "order", "why"),
    [
        ("h264", Order.PTS, None),
        ("hevc_open_gop", Order.PTS, None),
        ("h264_one_gop", Order.PTS, SequenceReason.NO_START),
        ("h264_intra_refresh", Order.PTS, SequenceReason.NO_START),
        ("h264_raw", Order.SEQUENCE, SequenceReason.NO_PTS),
        ("h264_open_gop_headless", Order.SEQUENCE, SequenceReason.NO_START),
        ("mpeg4_mixed_up", Order.SEQUENCE, SequenceReason.DISORDER),
        ("h264_mixed_up", Order.SEQUENCE, SequenceReason.DISORDER),
        ("mpeg4_decoding_times", Order.SEQUENCE, SequenceReason.DISORDER),
        ("h264_decoding_times", Order.SEQUENCE, SequenceReason.DISORDER),
        ("h264_interlaced_decoding_times", Order.SEQUENCE, SequenceReason.DISORDER),
        ("hevc_decoding_times", Order.SEQUENCE, SequenceReason.DISORDER),
        ("mpeg4", Order.PTS, None),
        ("mpeg4_mkv", Order.PTS, None),
        ("h264_pyramid", Order.PTS, None),
        ("h264_interlaced", Order.PTS, None),
        ("h264_ts", Order.PTS, None),
        ("hevc_layers", Order.PTS, None),
        ("hevc_ts", Order.PTS, None),
        ("vp9_hidden", Order.PTS, None),
        ("mpeg2", Order.SEQUENCE, SequenceReason.CODEC),
        ("one_frame", Order.PTS, None),
    ],
)
def test_order(name: str, order: Order, why: SequenceReason | None) -> None:
    assert (video(name).index.order, video(name).index.why_sequence) == (order, why)


@pytest.mark.parametrize(
    ("name", "rotation"), [("h264", 0), ("h264_rotated", 90), ("h264_upside_down", 180), ("h264_rotated_left", 270)]
)
def test_rotation(name: str, rotation: int) -> None:
    assert video(name).index.rotation == rotation


def test_what_the_container_says() -> None:
    index = video("h264").index
    assert (index.codec, index.width, index.height, index.pixel_format) == ("h264", *clips.SIZE, "yuv420p")
    assert (index.header_frames, index.fps, index.duration_seconds) == (48, 30.0, 1.6)
    assert index.in_file
    assert video("h264_mkv").index.in_file
    assert not video("h264_ts").index.in_file
    assert video("h264_mkv").index.header_frames == 0
    assert (video("av1").index.codec, video("av1").index.decoder) == ("av1", "libdav1d")


def test_an_edit_list_hides_frames() -> None:
    index = video("h264_trimmed").index
    assert shown_frames(index) == 48 - 17
    assert len(index.packets) > shown_frames(index)


@pytest.mark.parametrize("name", ["h264_truncated", "h264_mkv_truncated"])
def test_of_a_truncated_file_what_is_there(name: str) -> None:
    assert 10 < len(video(name).index.packets) < 48


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"this is not a video " * 50, "not a readable video"),
        (bytes(5000), "not a readable video"),
        (b"\xff\xd8\xff\xe0" + bytes(400), "not a readable video"),
        *[(playlist, "not a readable video") for playlist in clips.PLAYLISTS.values()],
    ],
)
def test_no_video(data: bytes, message: str) -> None:
    with pytest.raises(VideoInputError, match=message):
        read(data)


def test_a_file_that_ends_in_its_header() -> None:
    with pytest.raises(VideoInputError, match="not a readable video"):
        read(clip("h264")[:200])


def test_sound_alone() -> None:
    with pytest.raises(VideoInputError, match="no video stream"):
        read(clips.audio_only())


def test_no_frames() -> None:
    with pytest.raises(VideoInputError, match=r"has no frames|size of its frames"):
        read(clips.zero_frames())


@pytest.mark.parametrize(
    ("name", "limits", "option"),
    [
        ("h264", {"max_pixels": 1000}, "max_pixels"),
        ("h264", {"max_frames": 40}, "max_frames"),
        ("h264_mkv", {"max_frames": 40}, "max_frames"),  # whose header does not say
        ("h264_ts", {"max_frames": 40}, "max_frames"),
        ("h264", {"max_duration_seconds": 1}, "max_duration_seconds"),
    ],
)
def test_limits(name: str, limits: dict[str, float], option: str) -> None:
    read(clip(name))
    with pytest.raises(VideoLimitError, match=option):
        read(clip(name), **limits)


def test_nothing_stays_open() -> None:
    read(clip("h264_ts"))
    with nothing_left_open():
        for _ in range(5):
            read(clip("h264_ts"))
            for data, limits in ((b"x", {}), (clip("h264_ts"), {"max_frames": 20}), (clips.audio_only(), {})):
                with pytest.raises(VideoInputError):
                    read(data, **limits)


def test_noise_in_a_file_is_no_crash() -> None:
    rng = np.random.default_rng(3)
    for n in range(40):
        data = bytearray(clip("h264" if n % 2 else "h264_mkv"))
        for at in rng.integers(0, len(data), 30):
            data[at] = rng.integers(0, 256)
        try:
            read(bytes(data))
        except VideoInputError as error:
            assert str(error).startswith("video: ")  # noqa: PT017 - most of them are read


DESCRIPTION = """Input #0, matroska,webm, from 'fd:':
  Metadata:
    title           : Stream #0:0 displaymatrix: rotation of -90.00 degrees
  Stream #0:0: Video: h264 (High), yuv420p
      Metadata:
        title           : Stream #0:0 displaymatrix: rotation of -90.00 degrees
  Stream #0:1(eng): Video: h264 (High), yuv420p
  Stream #0:10[0x1](und): Video: h264 (High), yuv420p
      Side data:
        Display Matrix: rotation of -90.00 degrees
"""


@pytest.mark.parametrize(("index", "rotation"), [(0, 0), (1, 0), (10, 90)])
def test_only_side_data_of_the_stream_itself_turns_it(index: int, rotation: int) -> None:
    assert demux._rotation_in(DESCRIPTION, index) == rotation


class NewStreams:
    """A container in which other streams begin amid the file, as PyAV demuxes it: an error, then all goes on."""

    def __init__(self, streams: int) -> None:
        self.packets = [av.Packet(n + 1) for n in range(6)]
        self._left, self._to_come = streams, iter(self.packets)

    def demux(self, _: object) -> Iterator[av.Packet]:
        for packet in self._to_come:
            yield packet
            if self._left:
                self._left -= 1
                raise IndexError("list index out of range")


def test_streams_that_begin_amid_the_file_cost_no_packets() -> None:
    notes: list[str] = []
    container = NewStreams(4)
    assert list(demux._demuxed(container, None, notes)) == container.packets
    assert notes == []

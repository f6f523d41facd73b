"""What sampling rules are told about a video."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vllm_omni_sched.engine.video.source import Source, frame_size, source_of
from vllm_omni_sched.video.facts import PACKET, Order, PacketFlag, SequenceReason, VideoIndex


def index_of(frames: int, *, gop: int = 10, hidden: int = 0, step: int = 512, **facts: Any) -> VideoIndex:
    """Return an index of `frames` frames at 30/s, the first `hidden` of them hidden by an edit list."""
    packets = np.zeros(frames, PACKET)
    packets["pts"] = packets["dts"] = (np.arange(frames) - hidden) * step
    packets["flags"][::gop] = PacketFlag.START
    packets["flags"][:hidden] |= PacketFlag.HIDDEN
    plain = VideoIndex(
        codec="h264",
        extradata=b"",
        width=160,
        height=120,
        rotation=0,
        pixel_format="yuv420p",
        time_base=(1, 15_360),
        header_frames=frames,
        fps=30.0,
        duration_seconds=frames / 30,
        packets=packets,
        in_file=True,
    )
    return replace(plain, **facts)


def test_the_header_counts_the_frames():
    assert source_of(index_of(90)) == Source(90, 30.0, 3.0)


def test_without_a_header_the_duration_does():
    assert source_of(index_of(90, header_frames=0, duration_seconds=2.99)) == Source(90, 30.0, 3.0)


@pytest.mark.parametrize("order", Order)
def test_without_both_the_packets_do(order):
    streamed = index_of(90, header_frames=0, duration_seconds=0.0, order=order)
    assert source_of(streamed) == Source(90, 30.0, 3.0)


@pytest.mark.parametrize("hidden", [2, 5, 17, 40])
def test_frames_behind_an_edit_list_do_not_count(hidden):
    trimmed = index_of(90, hidden=hidden)
    assert source_of(trimmed).total_frames == 90 - hidden
    assert source_of(trimmed, cross_check=False).total_frames == 90  # vLLM before 0.30


def test_packets_that_an_edit_list_leaves_out_altogether_do_not_count():
    """As FFmpeg reads them: what is needed by no frame that is shown is not there."""
    whole = index_of(90, hidden=40, duration_seconds=50 / 30)
    assert source_of(replace(whole, packets=whole.packets[30:])).total_frames == 50


def test_sound_with_a_cover_is_one_frame():
    """The cover lasts as long as the sound, at one frame per unit of time; vLLM's look at the end finds one frame."""
    facts = {"codec": "png", "header_frames": 0, "duration_seconds": 300.0, "order": Order.SEQUENCE}
    cover = index_of(1, time_base=(1, 90_000), fps=0.0, **facts)
    for cross_check in (True, False):
        assert source_of(cover, cross_check=cross_check) == Source(1, 90_000.0, 1 / 90_000)


@pytest.mark.parametrize(("seconds", "total"), [(3.1, 93), (5.9, 177), (6.1, 90), (3000.0, 90)])
def test_a_duration_is_believed_up_to_twice_the_frames(seconds, total):
    said = index_of(90, header_frames=0, duration_seconds=seconds, order=Order.SEQUENCE)
    assert source_of(said, cross_check=False).total_frames == total


def test_a_header_that_is_off_by_one_is_believed():
    assert source_of(index_of(90, hidden=1)).total_frames == 90


def test_frames_before_the_first_start_do_not_count():
    cut = index_of(90, gop=30, header_frames=0, order=Order.SEQUENCE, why_sequence=SequenceReason.NO_START)
    assert source_of(replace(cut, packets=cut.packets[10:], duration_seconds=80 / 30)).total_frames == 60


@pytest.mark.parametrize(("frames", "total"), [(0, 90), (89, 90), (88, 88), (91, 90)])
def test_without_pts_the_header_is_believed_up_to_one_frame_more_than_there_are(frames, total):
    assert source_of(replace(index_of(90, order=Order.SEQUENCE), frames=frames)).total_frames == total


def test_without_pts_sound_that_is_longer_adds_no_frames():
    longer = index_of(90, header_frames=0, duration_seconds=3.1, order=Order.SEQUENCE)
    assert source_of(longer).total_frames == 90
    assert source_of(longer, cross_check=False).total_frames == 93  # vLLM before 0.30


def test_hidden_frames_do_not_count_where_pts_are_no_numbers():
    """Such pts come from two edits that show the same frames."""
    assert source_of(index_of(90, hidden=20, order=Order.SEQUENCE)).total_frames == 70


@pytest.mark.parametrize("at", [30, 85])
def test_a_hidden_start_behind_the_frames_that_are_shown(at):
    """Such a start precedes the last of several edits, or is in a damaged file."""
    index = index_of(90)
    index.packets["flags"][[at, *range(at + 1, 90)]] |= PacketFlag.HIDDEN
    index.packets["pts"][at:] -= 20 * 512
    index.packets["pts"][89] = 10_000_000
    index.packets["flags"][[at, 89]] |= PacketFlag.START
    index.packets["pts"][at] = index.packets["pts"][at - 1] + 1
    assert source_of(index).total_frames == at


@pytest.mark.parametrize("facts", [{"fps": 1e-9, "time_base": (0, 1)}, {"fps": 0.0, "time_base": (1, 0)}])
def test_without_any_rate_the_header_is_believed(facts):
    assert source_of(index_of(90, hidden=20, **facts)).total_frames == 90


def test_the_rate_is_the_mean():
    variable = source_of(index_of(90, step=15_360 // 18, mean_fps=18.0, header_frames=0, duration_seconds=5.0))
    assert (variable.total_frames, variable.fps, variable.duration_seconds) == (90, 18.0, 5.0)


@pytest.mark.parametrize("order", Order)
def test_a_file_that_is_cut_off_has_the_frames_that_are_there(order):
    whole = index_of(90, order=order)
    assert source_of(replace(whole, packets=whole.packets[:40])).total_frames == 40


def test_without_a_rate_there_is_one_frame_per_unit_of_time():
    unknown = source_of(index_of(90, fps=0.0, time_base=(1, 25)))
    assert (unknown.total_frames, unknown.fps) == (90, 25.0)


@pytest.mark.parametrize(
    ("rotation", "size"), [(0, (160, 120)), (90, (120, 160)), (180, (160, 120)), (270, (120, 160))]
)
def test_the_size_is_that_of_turned_frames(rotation, size):
    assert frame_size(index_of(10, rotation=rotation)) == size

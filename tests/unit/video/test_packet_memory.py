"""Which pages of a video decoders need yet."""

from __future__ import annotations

import mmap

import numpy as np

from vllm_omni_sched.video.facts import PACKET, Order, PacketFlag, Piece, VideoIndex
from vllm_omni_sched.video.packet_memory import PageUse

PAGE = mmap.PAGESIZE


def index(*sizes: int) -> VideoIndex:
    packets = np.zeros(len(sizes), PACKET)
    packets["nbytes"] = sizes
    packets["offset"] = np.cumsum([0, *sizes[:-1]])
    return VideoIndex("h264", b"", 16, 16, 0, "", (1, 1), 0, 0.0, 0.0, packets, True)


def piece(*feed: int) -> Piece:
    return Piece(0, np.array(feed, np.int32), (), Order.PTS, 0.0)


def test_what_no_piece_needs() -> None:
    use = PageUse(index(PAGE, PAGE, PAGE, PAGE, 10), 4 * PAGE + 10, [piece(0), piece(2)])
    assert use.unneeded() == [(PAGE, PAGE), (3 * PAGE, 2 * PAGE)]
    assert use.release(piece(2)) == [(2 * PAGE, PAGE)]
    assert use.release(piece(0)) == [(0, PAGE)]


def test_pages_that_several_need_stay_until_the_last() -> None:
    use = PageUse(index(PAGE // 2, PAGE, PAGE // 2, 0), 2 * PAGE, [piece(0, 3), piece(1), piece(2)])
    assert use.unneeded() == []
    assert use.release(piece(1)) == []
    assert use.release(piece(0, 3)) == [(0, PAGE)]
    assert use.release(piece(2)) == [(PAGE, PAGE)]


def test_the_first_start_stays_if_decoders_open_the_video_by_it() -> None:
    video = index(PAGE, PAGE, PAGE, PAGE)
    video.packets["flags"][[1, 3]] = PacketFlag.START
    use = PageUse(video, 4 * PAGE, [piece(1, 2), piece(3)], keeps_start=True)
    assert use.unneeded() == [(0, PAGE)]
    assert use.release(piece(1, 2)) == [(2 * PAGE, PAGE)]
    assert PageUse(video, 4 * PAGE, [piece(3)], keeps_start=True).unneeded() == [(0, PAGE), (2 * PAGE, PAGE)]
    assert PageUse(video, 4 * PAGE, [piece(3)]).unneeded() == [(0, 3 * PAGE)]

"""Whatever the packets are: each wanted frame is decoded once, from where it can be, and nothing that is not needed."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.video.facts import PACKET, Order, PacketFlag, PieceResult, VideoIndex
from vllm_omni_sched.video.frame_order import order_of, reorder_depth, shown_pts
from vllm_omni_sched.video.plan import plan
from vllm_omni_sched.video.repair import repair

START, HIDDEN, DROPPABLE = (int(flag) for flag in (PacketFlag.START, PacketFlag.HIDDEN, PacketFlag.DROPPABLE))


@st.composite
def videos(draw: st.DrawFn) -> VideoIndex:
    """Groups of a start, leading pictures of an open GOP, and frames in groups of a P and its Bs; some of it hidden."""
    rows = []
    shown = 0
    for _ in range(draw(st.integers(1, 5))):
        leading = draw(st.integers(0, 3)) if rows else 0
        rows.append((shown + leading, START))
        rows += [(shown + n, DROPPABLE) for n in draw(st.permutations(range(leading)))]
        shown += leading + 1
        for _ in range(draw(st.integers(0, 4))):
            between = draw(st.integers(0, 3))
            rows.append((shown + between, 0))
            rows += [(shown + n, draw(st.sampled_from([0, DROPPABLE]))) for n in range(between)]
            shown += between + 1
    times = np.cumsum(draw(st.lists(st.integers(1, 90), min_size=shown, max_size=shown)))
    packets = np.zeros(len(rows), PACKET)
    packets["pts"] = [times[place] for place, _ in rows]
    packets["flags"] = [flags for _, flags in rows]
    packets["nbytes"] = draw(st.lists(st.integers(1, 9000), min_size=len(rows), max_size=len(rows)))
    hidden = draw(st.integers(0, shown - 1))
    packets["flags"] |= np.where(packets["pts"] < times[hidden], HIDDEN, 0)
    order, why = order_of(packets, known=True, irregular=False)
    return VideoIndex(
        "h264", b"", 160, 120, 0, "yuv420p", (1, 1000), 0, 0.0, 0.0, packets, True, 2, order, why
    )  # fmt: skip


@st.composite
def wanted(draw: st.DrawFn, index: VideoIndex) -> list[int]:
    frames = len(shown_pts(index))
    return sorted(draw(st.sets(st.integers(0, frames + 1), min_size=1)))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_plan(data: st.DataObject) -> None:
    index = data.draw(videos())
    numbers = data.draw(wanted(index))
    planned = plan(index, numbers, data.draw(st.integers(1, 56)))
    packets, shown = index.packets, shown_pts(index)
    assert index.order is Order.PTS
    slots = [one.slot for piece in planned.pieces for one in piece.wanted]
    assert sorted([*slots, *planned.absent]) == list(range(len(numbers)))
    assert [numbers[slot] >= len(shown) for slot in sorted(planned.absent)] == [True] * len(planned.absent)
    assert [piece.cost for piece in planned.pieces] == sorted((piece.cost for piece in planned.pieces), reverse=True)
    assert [piece.number for piece in planned.pieces] == list(range(len(planned.pieces)))
    for piece in planned.pieces:
        feed = piece.feed.tolist()
        assert feed == sorted(set(feed))
        pts = packets["pts"][feed]
        mine = {one.pts for one in piece.wanted}
        assert mine <= set(pts.tolist())
        assert packets["pts"][feed[-1]] in mine  # not one packet too many at its end
        first = packets[feed[0]]
        assert feed[0] == 0 or first["flags"] & START
        assert feed[0] == 0 or min(mine) >= first["pts"]
        later = np.flatnonzero((packets["flags"] & START != 0) & (packets["pts"] <= min(mine)))
        assert feed[0] == later.max(initial=0)  # nor at its beginning
        for one in piece.wanted:
            assert (one.frame, one.pts) == (numbers[one.slot], shown[one.frame])
        left_out = np.setdiff1d(np.arange(feed[0], feed[-1] + 1), feed)
        assert (packets["flags"][left_out] & DROPPABLE != 0).all()
        assert not mine & set(packets["pts"][left_out].tolist())
        dropped_in_vain = (packets["flags"][feed] & DROPPABLE != 0) & ~np.isin(
            pts, shown[[n for n in numbers if n < len(shown)]]
        )
        assert not dropped_in_vain.any()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_repair(data: st.DataObject) -> None:
    index = data.draw(videos())
    numbers = data.draw(wanted(index))
    pieces = plan(index, numbers, 4).pieces
    outcomes = []
    for piece in pieces:
        slots = [one.slot for one in piece.wanted]
        found = data.draw(st.sets(st.sampled_from(slots)))
        damaged = data.draw(st.booleans())
        outcomes.append((piece, PieceResult(tuple(found), damaged, len(found), 0.0, 0.0, 0)))
    again = repair(index, outcomes)
    bad = [p for p, r in outcomes if r.damaged or len(r.found) < len(p.wanted)]
    whole = [p for p in bad if len(p.feed) == p.feed[-1] + 1]  # already decoded as a plain decoder does
    if len(bad) == len(whole):
        assert again is None
        return
    assert again is not None
    assert {one.slot for one in again.piece.wanted} == {one.slot for p in bad if p not in whole for one in p.wanted}
    assert again.piece.feed.tolist() == list(range(max(int(p.feed[-1]) for p in bad if p not in whole) + 1))
    assert again.piece.number not in [piece.number for piece in pieces]
    nothing = PieceResult((), True, 0, 0.0, 0.0, 0)
    assert repair(index, [*[(p, r) for p, r in outcomes if p not in bad], (again.piece, nothing)]) is None


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_sequence(data: st.DataObject) -> None:
    index = data.draw(videos())
    packets = index.packets.copy()
    packets["pts"][-1] = packets["pts"][0]
    order, why = order_of(packets, known=True, irregular=False)
    if len(packets) > 1:
        assert order is Order.SEQUENCE
        assert why == "no_pts"


def test_reorder_depth_is_how_many_frames_overtake_one() -> None:
    packets = np.zeros(9, PACKET)
    packets["pts"] = [0, 8, 4, 2, 1, 3, 6, 5, 7]
    assert reorder_depth(packets) == 3
    packets["pts"] = np.arange(9)
    assert reorder_depth(packets) == 0


def video_of(pts: list[int], starts: list[int]) -> VideoIndex:
    packets = np.zeros(len(pts), PACKET)
    packets["pts"] = pts
    packets["flags"][starts] = START
    order, why = order_of(packets, known=True, irregular=False)
    return VideoIndex("h264", b"", 160, 120, 0, "", (1, 1000), 0, 0.0, 0.0, packets, True, 0, order, why)


def test_frames_whose_pts_turn_back_at_a_start_are_had_in_sequence() -> None:
    assert video_of([0, 1, 9, 3, 4, 5], [0, 3]).order is Order.SEQUENCE
    assert video_of([0, 9, 1, 12, 10, 11], [0, 3]).order is Order.PTS


def test_no_start_is_used_that_is_shown_before_a_packet_ahead_of_it() -> None:
    """Hidden packets may have any pts."""
    index = video_of([0, 1, 2, 3, 4, 5], [0, 3])
    index.packets["pts"][2] = 9
    (piece,) = plan(index, [5]).pieces
    assert piece.wanted[0].pts == 9
    assert piece.feed.tolist() == [0, 1, 2]

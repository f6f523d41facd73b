"""Who encodes where, and with what share of the device."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.resource.engine.lane import DecodeLoad, EncodeShare, LaneShare, ShareReason


def load(itl=0.05, target=0.1):
    return DecodeLoad(target, itl)


@pytest.mark.parametrize(
    ("decoding", "seconds", "expected"),
    [
        # rule 1
        (None, 1.0, "in_step no_decode"),
        (None, 1.01, "lane too_long"),
        # rule 3: 0.05 s are left
        (load(), 0.04, "in_step would_not_be_noticed"),
        (load(target=math.inf), 9.0, "in_step would_not_be_noticed"),
        # rule 4
        (load(), 0.06, "lane would_stall_decode"),
        (load(itl=0.2), 0.001, "lane would_stall_decode"),
        (load(itl=None), 0.001, "lane would_stall_decode"),
    ],
)
def test_rules(decoding, seconds, expected):
    placed = EncodeShare(max_alone_seconds=1.0).place(decoding, seconds)
    assert f"{placed.where.value} {placed.reason.value}" == expected


@pytest.mark.parametrize(
    ("decoding", "seconds", "at_a_time", "expected"),
    [
        (None, 0.2, 2, "in_step no_decode"),
        (None, 0.21, 2, "lane too_long"),
        (None, 0.21, 1, "in_step no_decode"),
        (load(), 0.04, 2, "in_step would_not_be_noticed"),
    ],
)
def test_several_items_go_to_a_lane_that_encodes_them_at_a_time(decoding, seconds, at_a_time, expected):
    placed = EncodeShare(max_alone_seconds=1.0, max_several_seconds=0.2).place(decoding, seconds, at_a_time)
    assert f"{placed.where.value} {placed.reason.value}" == expected


def run(control, itls, target=0.1, start=0.0):
    return [control.update(load(itl=itl, target=target), start + i / 10) for i, itl in enumerate(itls)]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=50), st.floats(0.01, 1))
def test_share_is_bounded_and_falls_while_over_target(itls, min_share):
    rows = run(LaneShare(min_share), itls)
    for (before, _), (after, reason), itl in zip(rows, rows[1:], itls[1:], strict=False):
        assert min_share <= after <= 1
        if itl > 0.1001:
            assert after < before or after == min_share
            assert reason in (ShareReason.OVER_TARGET, ShareReason.AT_MIN)


@settings(deadline=None)
@given(st.floats(0.02, 0.09), st.floats(0.05, 0.2))
def test_share_settles_where_the_itl_meets_its_target(base, slope):
    """The plant is itl = base + slope * share."""
    control, share = LaneShare(0.01), 1.0
    for step in range(600):
        share, _ = control.update(load(itl=base + slope * share), step / 10)
    reached = base + slope * share
    assert reached == pytest.approx(0.1, rel=0.05) or (share == 1 and reached < 0.1)


def test_no_windup():
    control = LaneShare(0.1)
    run(control, [1.0] * 500)
    up = run(control, [0.0] * 100, start=50)
    assert up[-1] == (1.0, ShareReason.AT_MAX)
    assert run(control, [0.0] * 500, start=60)[-1][0] == 1.0
    assert run(control, [0.2] * 2, start=110)[-1][0] < 1.0


def test_reasons_of_the_share():
    control = LaneShare(0.1)
    assert control.update(None, 0.0) == (1.0, ShareReason.NO_DECODE)
    assert control.update(load(target=math.inf), 0.0) == (1.0, ShareReason.NO_TARGET)
    assert control.update(load(itl=None), 0.1) == (1.0, ShareReason.NOT_MEASURED)
    assert control.update(load(itl=0.15), 1.1) == (pytest.approx(0.75), ShareReason.OVER_TARGET)
    assert control.update(None, 1.2) == (1.0, ShareReason.NO_DECODE)
    kept, reason = control.update(load(itl=0.09), 1.3)  # what was learnt is still there
    assert kept == pytest.approx(0.755)
    assert reason is ShareReason.UNDER_TARGET

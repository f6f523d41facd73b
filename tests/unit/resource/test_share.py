"""Who encodes where, and with what share of the device."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.lane_share import DecodeLoad, LaneShare, ShareReason
from vllm_omni_sched.resource.share import EncodeGroup, EncodeShare, EncodeSnapshot, Where


def load(itl=0.05, p99=None, target=0.1, number=4, name="interactive"):
    return DecodeLoad(name, number, target, itl, p99)


def group(key, seconds=0.2, since=0.0, deadline=math.inf):
    return EncodeGroup(key, 2, seconds / 2, since, deadline)


def policy(**options):
    return EncodeShare(LaneShare(min_share=0.1), **options)


OPTIONS = ("min_share", "integral", "proportional", "max_wait_seconds", "max_stall")
IDLE, BUSY, OVER = (), (load(),), (load(itl=0.2),)


@pytest.mark.parametrize(
    ("decoding", "groups", "room", "expected"),
    [
        # rule 1
        (IDLE, [group("a", 9)], 1, ["in_step no_decode"]),
        ((load(number=0),), [group("a", 9)], 1, ["in_step no_decode"]),
        (BUSY, [group("a", 9)], None, ["in_step no_lane"]),
        # rule 2: one, the oldest
        (OVER, [group("a", since=-9), group("b", since=-10)], 0, ["wait lane_full", "in_step aged"]),
        (OVER, [group("a", since=-5)], 0, ["in_step aged"]),
        (OVER, [group("a", since=-4.9)], 0, ["wait lane_full"]),
        # rule 3: 0.05 s are left
        (BUSY, [group("a", 0.04)], 1, ["in_step would_not_be_noticed"]),
        (BUSY, [group("a", 0.06)], 1, ["lane would_stall_decode"]),
        (BUSY, [group("a", 0.03), group("b", 0.03)], 1, ["in_step would_not_be_noticed", "lane would_stall_decode"]),
        (
            BUSY,
            [group("a", 0.03), group("b", 0.03, deadline=99)],
            0,
            ["wait lane_full", "in_step would_not_be_noticed"],
        ),
        ((load(p99=0.11),), [group("a", 0.04)], 1, ["lane would_stall_decode"]),
        ((load(itl=None),), [group("a", 0.04)], 1, ["lane would_stall_decode"]),
        ((load(target=math.inf),), [group("a", 9)], 1, ["in_step would_not_be_noticed"]),
        ((load(), load(itl=0.09)), [group("a", 0.04)], 1, ["lane would_stall_decode"]),
        # rule 4: 0.15 s in the step, 0.6 s in the lane
        (OVER, [group("a", 0.15, deadline=0.5)], 1, ["in_step deadline"]),
        (OVER, [group("a", 0.15, deadline=0.7)], 1, ["lane would_stall_decode"]),
        (OVER, [group("a", 0.15, deadline=0.7)], 0, ["in_step deadline"]),
        (OVER, [group("a", 0.15, deadline=0.1)], 1, ["lane would_stall_decode"]),  # lost either way
        (OVER, [group("a", 0.25, deadline=0.5)], 1, ["lane would_stall_decode"]),  # too long a stall
        (
            OVER,
            [group("a", 0.05, deadline=0.1), group("b", 0.05, deadline=0.2)],
            0,
            ["in_step deadline", "wait lane_full"],
        ),
        # rules 5 and 6
        (
            OVER,
            [group("a"), group("b"), group("c", deadline=99)],
            2,
            ["lane would_stall_decode", "wait lane_full", "lane would_stall_decode"],
        ),
    ],
)
def test_rules(decoding, groups, room, expected):
    snapshot = EncodeSnapshot(decoding, tuple(groups), room, in_step_seconds=0.1, in_lane_seconds=0.4)
    plan = policy().plan(snapshot, now=0.0)
    assert [f"{p.where.value} {p.reason.value}" for p in plan.placements] == expected
    assert [p.key for p in plan.placements] == [g.key for g in groups]


@pytest.mark.parametrize(("backlog", "where"), [(0.0, Where.LANE), (0.3, Where.IN_STEP)])
def test_the_lane_is_as_slow_as_its_share_until_it_was_measured_and_its_backlog_counts(backlog, where):
    snapshot = EncodeSnapshot(OVER, (group("a", 0.15, deadline=0.4),), 1, backlog)
    assert policy().plan(snapshot, now=0.0).placements[0].where is where


loads = st.lists(
    st.builds(
        DecodeLoad,
        st.just("c"),
        st.integers(0, 3),
        st.sampled_from([0.05, 0.2, math.inf]),
        st.one_of(st.none(), st.floats(0, 1)),
        st.one_of(st.none(), st.floats(0, 1)),
    ),
    max_size=3,
).map(tuple)
groups_ = st.lists(
    st.builds(
        EncodeGroup,
        st.uuids().map(str),
        st.integers(1, 4),
        st.floats(0, 0.5),
        st.floats(-8, 0),
        st.one_of(st.just(math.inf), st.floats(-1, 3)),
    ),
    max_size=8,
).map(tuple)


@settings(deadline=None)
@given(loads, groups_, st.one_of(st.none(), st.integers(0, 3)), st.floats(0, 2))
def test_decode_is_not_stalled_beyond_what_the_rules_allow(decoding, groups, room, backlog):
    plan = policy().plan(EncodeSnapshot(decoding, groups, room, backlog), 0.0)
    assert [p.key for p in plan.placements] == [g.key for g in groups]
    assert sum(p.where is Where.LANE for p in plan.placements) <= (room or 0)
    seconds = {g.key: g.seconds for g in groups}
    by_reason = {}
    for placed in plan.placements:
        by_reason.setdefault(placed.reason.value, []).append(seconds[placed.key])
    assert len(by_reason.get("aged", [])) <= 1
    assert len(by_reason.get("deadline", [])) <= 1
    live = [d for d in decoding if d.num_decoding and d.itl_target_seconds < math.inf]
    if live and all(d.itl_seconds is not None for d in live):
        left = max(0.0, min(d.itl_target_seconds - d.itl_seconds for d in live))
        assert sum(by_reason.get("would_not_be_noticed", [])) <= left + 1e-9
    if live:
        assert sum(by_reason.get("deadline", [])) <= 2 * min(d.itl_target_seconds for d in live) + 1e-9


@settings(deadline=None)
@given(groups_.filter(len))
def test_a_waiting_group_is_encoded_whatever_decode_and_lane_do(groups):
    """Over target for ever and the lane full: one step a second, the k-th oldest k steps after it has aged."""
    control, waiting, now = policy(max_wait_seconds=3), list(groups), 0.0
    for _ in range(4 + len(groups)):
        plan = control.plan(EncodeSnapshot((load(itl=0.5, target=0.05),), tuple(waiting), 0), now)
        gone = {p.key for p in plan.placements if p.where is Where.IN_STEP}
        waiting = [g for g in waiting if g.key not in gone]
        now += 1
    assert not waiting


def run(control, itls, target=0.1, start=0.0):
    return [control.update((load(itl=itl, target=target),), start + i / 10) for i, itl in enumerate(itls)]


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
    """On the plant itl = base + slope * share."""
    control, share = LaneShare(0.01), 1.0
    for step in range(600):
        share, _ = control.update((load(itl=base + slope * share),), step / 10)
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
    assert control.update((), 0.0) == (1.0, ShareReason.NO_DECODE)
    assert control.update((load(target=math.inf),), 0.0) == (1.0, ShareReason.NO_TARGET)
    assert control.update((load(itl=None),), 0.1) == (1.0, ShareReason.NOT_MEASURED)
    assert control.update((load(itl=0.15), load(itl=0.01)), 1.1) == (pytest.approx(0.75), ShareReason.OVER_TARGET)
    assert control.update((), 1.2) == (1.0, ShareReason.NO_DECODE)
    kept, reason = control.update((load(itl=0.09),), 1.3)  # what was learnt is still there
    assert kept == pytest.approx(0.755)
    assert reason is ShareReason.UNDER_TARGET


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LaneShare(min_share=0), "min_share"),
        (lambda: LaneShare(integral=0), "integral"),
        (lambda: LaneShare(proportional=-1), "proportional"),
        (lambda: policy(max_wait_seconds=0), "max_wait_seconds"),
        (lambda: policy(max_stall=-1), "max_stall"),
        (lambda: load(itl=math.nan), "itl_seconds"),
        (lambda: load(p99=-1.0), "itl_p99_seconds"),
        (lambda: load(target=0.0), "itl_target_seconds"),
        (lambda: EncodeGroup("a", 0, 1.0, 0.0), "num_items"),
        (lambda: EncodeGroup("a", 1, math.inf, 0.0), "seconds_each"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(ValueError, match=message) as caught:
        make()
    assert isinstance(caught.value, ConfigError) == (message in OPTIONS)

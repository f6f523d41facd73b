"""Partition: what is merged, what is split, and when a plan is changed."""

import pytest

from vllm_omni_sched.graph.partition import Partitioner, StageAction, StageReason
from vllm_omni_sched.graph.partition_model import Device, LinkSpeeds, PartitionSnapshot, Score, StageProfile
from vllm_omni_sched.graph.partition_search import Shortage

GIB = 1 << 30
CHAIN = {(0, 1): 0.1, (1, 2): 0.1}
UNIT = LinkSpeeds(default=1.0)  # so that bytes are seconds


def snapshot(
    memory=(24, 24), stages=((4, 1.0), (8, 1.0), (2, 0.5)), payloads=CHAIN, interference=1.2, links=UNIT, **more
):
    devices = tuple(Device(name, int(gib * GIB)) for name, gib in zip("ABC", memory, strict=False))
    return PartitionSnapshot(
        devices,
        tuple(StageProfile(n, gib * GIB, 0, seconds, interference) for n, (gib, seconds) in enumerate(stages)),
        {edge: nbytes for edge, nbytes in payloads.items() if max(edge) < len(stages)},
        links,
        **more,
    )


def planned(given, current=None, now=0.0, **options):
    return Partitioner(**options).plan(given, current, now)


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        # two devices: the long one alone, the other two merged at 1.2 x 1.5 s
        (snapshot(stages=((4, 1.0), (8, 3.0), (2, 0.5))), ((0, 2),)),
        # little room: the two small ones share, whatever it costs
        (snapshot(memory=(9, 9), stages=((4, 3.0), (8, 1.0), (4, 3.0))), ((0, 2),)),
        # three devices: split and pipelined
        (snapshot(memory=(24, 24, 24)), ()),
        # one that takes no time: beside its neighbour, which saves the transfer
        (snapshot(stages=((4, 2.0), (8, 0.0)), interference=1.0), ((0, 1),)),
        # merged they use what the other leaves idle
        (snapshot(stages=((4, 1.0), (8, 1.0)), interference=0.4), ((0, 1),)),
        (snapshot(memory=(24,)), ((0, 1, 2),)),
    ],
)
def test_merged_or_split(given, merged):
    plan = planned(given, headroom=0.0)
    assert plan.merged == merged
    assert plan.proven
    assert plan.reason.value == "first"


def test_what_a_plan_comes_to():
    given = snapshot(stages=((4, 1.0), (8, 3.0), (2, 0.5)), links=LinkSpeeds({("A", "B"): 0.1}, 1.0))
    # 1 alone takes 3 s, 0 and 2 together 1.2 x 1.5 s; a transfer 0.1 s there, and 0.1 s x 10 back
    assert given.score({0: "B", 1: "A", 2: "B"}) == pytest.approx(Score(3.0, 3.0 + 1.8 + 0.1 + 1.0, 0))
    plan = planned(given, {0: "A", 1: "B", 2: "B"})
    assert plan.assignment == {0: "A", 1: "B", 2: "A"}  # as good as the other way round, with one move
    assert plan.throughput == pytest.approx(1 / 3)
    assert plan.latency_seconds == pytest.approx(5.9)
    assert plan.moves == 1
    assert str(plan) == "better: stages 0 on A, 1 on B, 2 on A"


def test_the_faster_device_gets_more():
    devices = (Device("slow", GIB), Device("fast", GIB, speed=3.0))
    stages = tuple(StageProfile(n, 0, 0, 1.0) for n in range(4))
    assert sorted(planned(PartitionSnapshot(devices, stages)).assignment.values()) == ["fast"] * 3 + ["slow"]


def test_memory_counts_for_the_whole_batch():
    stages = (StageProfile(0, GIB, GIB, 1.0), StageProfile(1, GIB, GIB, 1.0))
    devices = (Device("A", 8 * GIB),)
    assert planned(PartitionSnapshot(devices, stages, batch=3), headroom=0).merged == ((0, 1),)
    plan = planned(PartitionSnapshot(devices, stages, batch=4), headroom=0)
    assert plan.shortage == Shortage(1, 2 * GIB)


def test_impossible_names_the_stage_and_the_bytes():
    plan = planned(snapshot(memory=(24, 6), stages=((4, 1.0), (30, 1.0))))
    assert plan.assignment is None
    assert plan.proven
    assert str(plan) == f"impossible: stage 1 lacks {6 * GIB} bytes on the device with the most free memory"
    assert plan.throughput == 0


def test_what_was_not_looked_at_is_not_called_impossible():
    # 5 + 3 + 2 and 4 + 4 + 2 fill 10 each; by size or by load, one after the other, they do not fit
    hard = snapshot(memory=(10, 10), stages=tuple((gib, 1.0) for gib in (5, 4, 4, 3, 2, 2)))
    assert planned(hard, headroom=0.0).reason.value == "first"
    cut = planned(hard, headroom=0.0, max_nodes=0)
    assert (cut.assignment, cut.reason.value, cut.proven) == (None, "not_found", False)


# stages 0 and 1 apart: 1 s; together: 2.4 s
APART, TOGETHER = {0: "A", 1: "B"}, {0: "A", 1: "A"}
PAIR = ((4, 1.0), (8, 1.0))


@pytest.mark.parametrize(
    ("given", "current", "expected"),
    [
        (snapshot(stages=PAIR), None, "first"),
        (snapshot(stages=PAIR), APART, "held"),
        (snapshot(stages=PAIR), TOGETHER, "better"),
        (snapshot(memory=(24, 4), stages=PAIR), APART, "pressure"),
        (snapshot(memory=(24, 8), stages=PAIR), APART, "held"),  # to the last byte
        (snapshot(memory=(24, 8), stages=PAIR), TOGETHER, "better"),  # 0 to B and 1 to A
        (snapshot(memory=(11, 8), stages=PAIR), TOGETHER, "pressure"),
        (snapshot(memory=(24,), stages=PAIR), APART, "changed"),
        (snapshot(stages=(*PAIR, (1, 0.1))), APART, "changed"),
        (snapshot(memory=(6, 6), stages=PAIR), APART, "impossible"),
    ],
)
def test_when_a_plan_changes(given, current, expected):
    plan = planned(given, current)
    assert plan.reason.value == expected
    assert (plan.assignment == current) is (expected == "held")


@pytest.mark.parametrize(("seconds", "changes"), [(1.0, False), (1.09, False), (1.12, True)])
def test_only_for_a_gain(seconds, changes):
    """Stage 2 shares with 0 (busy for 1 s + its own) or has a device to itself: then 1 is the busiest with 1 s."""
    given = snapshot(memory=(24,) * 3, stages=((1, seconds - 0.5), (1, 1.0), (1, 0.5)), interference=1.0)
    current = {0: "A", 1: "B", 2: "A"}
    assert (planned(given, current).assignment != current) is changes


# ---- stages on several devices

SPLIT = {1: 1.0, 2: 0.9}


def splittable(*stages, memory=(24, 24), links=UNIT, payloads=None, **more):
    """Return a snapshot of stages, each as GiB, seconds, and its efficiency by the number of devices."""
    devices = tuple(Device(name, int(gib * GIB)) for name, gib in zip("ABCD", memory, strict=False))
    profiles = tuple(
        StageProfile(n, int(gib * GIB), 0, seconds, efficiency=efficiency)
        for n, (gib, seconds, efficiency) in enumerate(stages)
    )
    return PartitionSnapshot(devices, profiles, payloads or {}, links, **more)


def told(plan):
    return [(one.place, one.action.value, one.reason.value) for one in plan.decisions]


def test_a_long_stage_is_split_over_the_devices_that_it_makes_quicker():
    given = splittable((4, 1.8, SPLIT), memory=(24, 24, 24))
    plan = planned(given)
    assert plan.assignment == {0: "A,B"}
    assert (plan.throughput, plan.latency_seconds) == (pytest.approx(1.0), pytest.approx(1.0))
    assert told(plan) == [("A,B", "split", "throughput")]


def test_a_stage_is_split_where_no_device_has_room_for_all_of_it():
    given = splittable((30, 1.0, {1: 1.0, 2: 0.4}))
    plan = planned(given)
    assert told(plan) == [("A,B", "split", "memory")]
    assert plan.latency_seconds == pytest.approx(1.25), "slower than on one device, which is too small"
    assert planned(splittable((30, 1.0, {1: 1.0}))).shortage == Shortage(0, 6 * GIB)


# ---- what transfers cost


def test_a_link_bounds_the_throughput_as_a_device_does():
    given = splittable((4, 1.0, {1: 1.0}), (4, 1.0, {1: 1.0}), payloads={(0, 1): 3.0})
    plan = planned(given)
    assert plan.merged == ((0, 1),), "2 s on one device, and 3 s over the link"
    assert told(plan) == [(plan.assignment[0], "joined", "throughput")] * 2
    assert planned(splittable((4, 1.0, {1: 1.0}), (4, 1.0, {1: 1.0}), payloads={(0, 1): 1.5})).merged == ()


def test_stages_that_send_much_are_near_each_other():
    stages = [(4, 1.0, {1: 1.0})] * 2
    links = LinkSpeeds({("C", "D"): 9.0}, 1.0)
    given = splittable(*stages, memory=(24, 2, 24, 24), payloads={(0, 1): 0.9}, links=links)
    plan = planned(given)
    assert plan.assignment == {0: "C", 1: "D"}
    assert plan.latency_seconds == pytest.approx(2.1)
    assert {one.reason for one in plan.decisions} == {StageReason.LATENCY}


def test_groups_that_share_a_device_send_nothing_and_others_over_their_quickest_link():
    links = LinkSpeeds({("A", "C"): 5.0}, 1.0)
    assert links.quickest("A,B", "B,C") == (None, float("inf"))
    assert links.quickest("A,B", "C") == (("A", "C"), 5.0)
    assert links.quickest("C", "A,B") == (("C", "A"), 1.0), "each direction has its own speed"


# ---- what moves cost


@pytest.mark.parametrize(
    ("load", "horizon", "reason"),
    [
        (float("inf"), 600.0, "better"),
        (GIB, 600.0, "better"),  # 4 s of loading, and 1.4 times as many requests for 600 s
        (GIB / 20, 600.0, "better"),  # 80 s
        (GIB / 20, 60.0, "costly"),  # 80 s, and only 60 s to gain something
        (GIB / 250, 600.0, "costly"),  # 1000 s
    ],
)
def test_a_move_is_made_only_if_its_gain_pays_for_its_loading(load, horizon, reason):
    given = snapshot(stages=PAIR, load_bytes_per_second=load, horizon_seconds=horizon)
    plan = planned(given, TOGETHER)
    assert plan.reason.value == reason
    if reason == "costly":
        assert plan.assignment == TOGETHER
        assert {(one.action, one.reason) for one in plan.decisions} == {(StageAction.LEFT, StageReason.MOVE_COST)}
    else:
        (change,) = plan.changes
        assert (change.action, change.reason) == (StageAction.MOVED, StageReason.THROUGHPUT)
        assert change.stage_id == 0 or load == float("inf"), "the small stage moves"

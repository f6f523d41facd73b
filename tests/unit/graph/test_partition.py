"""Partition: what is merged, what is split, and when a plan is changed."""

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.graph.partition import Device, Partitioner, PartitionSnapshot, Score, Shortage, StageProfile

GIB = 1 << 30
CHAIN = {(0, 1): 0.1, (1, 2): 0.1}


def snapshot(memory=(24, 24), stages=((4, 1.0), (8, 1.0), (2, 0.5)), transfers=CHAIN, interference=1.2, **more):
    devices = tuple(Device(name, int(gib * GIB)) for name, gib in zip("ABC", memory, strict=False))
    return PartitionSnapshot(
        devices,
        tuple(StageProfile(n, gib * GIB, 0, seconds, interference) for n, (gib, seconds) in enumerate(stages)),
        {edge: seconds for edge, seconds in transfers.items() if max(edge) < len(stages)},
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
    given = snapshot(stages=((4, 1.0), (8, 3.0), (2, 0.5)), distances={("A", "B"): 10.0})
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


def test_a_change_only_after_the_cooldown_and_pressure_at_once():
    partitioner = Partitioner(cooldown_seconds=60)
    wide, narrow = snapshot(stages=PAIR), snapshot(memory=(24, 3), stages=PAIR)
    current = partitioner.plan(wide, None, 0.0).assignment
    seen = []
    for now, given in ((1, wide), (2, narrow), (30, wide), (61, wide), (62, wide), (63, narrow)):
        plan = partitioner.plan(given, current, float(now))
        seen.append(plan.reason.value)
        current = plan.assignment
    assert seen == ["cooldown", "pressure", "cooldown", "cooldown", "better", "pressure"]


def test_it_looks_for_something_better_now_and_then():
    partitioner, given = Partitioner(look_seconds=5), snapshot(stages=PAIR)
    assert partitioner.plan(given, APART, 0.0).reason.value == "held"
    seen = [partitioner.plan(given, TOGETHER, now) for now in (1.0, 4.9, 5.0)]
    assert [(plan.reason.value, plan.moves, plan.proven) for plan in seen] == [
        ("cooldown", 0, False),
        ("cooldown", 0, False),
        ("better", 1, True),
    ]


@pytest.mark.parametrize(
    ("high", "low", "least", "most"),
    [
        (8.8, 0.5, 10, 21),  # away, and back, once in each of ten cooldowns
        (4.2, 3.9, 1, 1),  # away, and not back: it would not leave the headroom
        (4.2, 4.0, 0, 0),
    ],
)
def test_memory_that_swings_does_not_flap(high, low, least, most):
    """The device of stage 0, which takes 4 GiB, has so much memory each other second, for ten cooldowns."""
    partitioner = Partitioner(cooldown_seconds=60)
    current, changes = {0: "B", 1: "A"}, 0
    for second in range(600):
        given = snapshot(memory=(14, low if second % 2 else high), stages=((4, 1.0), (8, 1.0)))
        plan = partitioner.plan(given, current, float(second))
        changes += plan.assignment != current
        current = plan.assignment
    assert least <= changes <= most


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device("A", -1), "'A': memory_bytes"),
        (lambda: Device("A", 1, speed=0), "'A': speed"),
        (lambda: StageProfile(3, -1, 0, 1.0), "stage 3: weights_bytes"),
        (lambda: StageProfile(3, 0, 0, float("nan")), "stage 3: seconds"),
        (lambda: StageProfile(3, 0, 0, 1.0, interference=0), "stage 3: interference"),
        (lambda: snapshot(memory=()), "a device and a stage at least"),
        (lambda: PartitionSnapshot((Device("A", 1),) * 2, (StageProfile(0, 0, 0, 1.0),)), "given twice"),
        (lambda: snapshot(batch=0), "batch must be"),
        (lambda: snapshot(distances={("A", "Z"): 1.0}), "distances: .*'Z'.* must name two of"),
        (lambda: snapshot(transfers={(1, 1): 1.0}), "transfers"),
        (lambda: snapshot(transfers={(0, 1): -1.0}), "transfers"),
        (lambda: Partitioner(min_gain=-1), "min_gain"),
        (lambda: Partitioner(headroom=1), "headroom"),
    ],
)
def test_out_of_range(make, message):
    with pytest.raises(ConfigError, match=message):
        make()

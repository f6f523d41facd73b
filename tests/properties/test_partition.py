"""The search against all assignments of small graphs, and the heuristic against its bound."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.partition import Partitioner, PartitionReason, StageAction
from vllm_omni_sched.graph.partition_model import Device, LinkSpeeds, PartitionSnapshot, StageProfile, better
from vllm_omni_sched.graph.partition_search import best_partition

NAMES = "ABCD"


DEGREES = [{1: 1.0}, {1: 1.0}, {1: 1.0, 2: 0.9}, {1: 1.0, 2: 0.5, 3: 0.75}, {2: 1.0}]


@st.composite
def snapshots(
    draw,
    max_memory=30,
    least_interference=1,
    most_interference=8,
    max_devices=3,
    max_stages=4,
    degrees=DEGREES,
    free=False,
):
    devices = tuple(
        Device(NAMES[n], draw(st.integers(max_memory // 4, max_memory)), draw(st.sampled_from([0.5, 1.0, 1.0, 2.0])))
        for n in range(draw(st.integers(1, max_devices)))
    )
    stages = tuple(
        StageProfile(
            n,
            draw(st.integers(0, 8)),
            draw(st.integers(0, 2)),
            draw(st.integers(0, 12)) / 4,
            draw(st.integers(least_interference, most_interference)) / 4,
            draw(st.sampled_from(degrees)),
        )
        for n in range(draw(st.integers(1, max_stages)))
    )
    pairs = [(one, other) for one in range(len(stages)) for other in range(one + 1, len(stages))]
    payloads = draw(st.dictionaries(st.sampled_from(pairs), st.integers(0, 4).map(lambda n: n / 8))) if pairs else {}
    ways = [(a.device_id, b.device_id) for a in devices for b in devices if a is not b]
    speeds = draw(st.dictionaries(st.sampled_from(ways), st.sampled_from([0.5, 2.0]), max_size=2)) if ways else {}
    if free:
        return PartitionSnapshot(devices, stages, payloads, batch=draw(st.integers(1, 3)))
    return PartitionSnapshot(
        devices,
        stages,
        payloads,
        LinkSpeeds(speeds, draw(st.sampled_from([1.0, math.inf]))),
        draw(st.sampled_from([1.0, math.inf])),
        draw(st.sampled_from([5.0, 100.0])),
        draw(st.integers(1, 3)),
    )


def places_of(snapshot, stage):
    """Return the positions of devices that a stage may have: neighbours, as many as it has an efficiency for."""
    number = len(snapshot.devices)
    return [tuple(range(n, n + degree)) for degree in stage.efficiency for n in range(number - degree + 1)]


def name_of(snapshot, group):
    return ",".join(snapshot.devices[n].device_id for n in group)


def currents(snapshot):
    choices = {stage.stage_id: places_of(snapshot, stage) for stage in snapshot.stages}
    if not all(choices.values()):
        return st.none()
    named = {one: st.sampled_from([name_of(snapshot, group) for group in each]) for one, each in choices.items()}
    return st.none() | st.fixed_dictionaries(named)


def all_scores(snapshot, current):
    """Yield the scores of all assignments that fit, computed in another way than in the code under test."""
    for groups in product(*(places_of(snapshot, stage) for stage in snapshot.stages)):
        seconds = []
        for stage, group in zip(snapshot.stages, groups, strict=True):
            together = sum(bool(set(group) & set(other)) for other in groups) > 1
            slowest = min(snapshot.devices[n].speed for n in group)
            alone = stage.seconds / len(group) / stage.efficiency[len(group)] / slowest
            seconds.append(alone * stage.interference if together else alone)
        busy = [
            sum(each for each, group in zip(seconds, groups, strict=True) if n in group)
            for n in range(len(snapshot.devices))
        ]
        used = [
            sum(
                -(-(stage.weights_bytes + stage.activation_bytes * snapshot.batch) // len(group))
                for stage, group in zip(snapshot.stages, groups, strict=True)
                if n in group
            )
            for n in range(len(snapshot.devices))
        ]
        sent = {}
        for (one, other), nbytes in snapshot.payload_bytes.items():
            if not set(groups[one]) & set(groups[other]):
                names = [[snapshot.devices[n].device_id for n in groups[at]] for at in (one, other)]
                speed, link = 0.0, None
                for pair in product(*names):
                    each = snapshot.links.speeds.get(pair, snapshot.links.default)
                    if each > speed:
                        speed, link = each, pair
                sent[link] = sent.get(link, 0.0) + nbytes / speed
        moved = [
            stage
            for stage, group in zip(snapshot.stages, groups, strict=True)
            if current and current[stage.stage_id] != name_of(snapshot, group)
        ]
        loading = sum(stage.weights_bytes for stage in moved) / snapshot.load_bytes_per_second
        if all(nbytes <= device.memory_bytes for nbytes, device in zip(used, snapshot.devices, strict=True)):
            busiest = max([*busy, *sent.values()])
            paid = busiest * (1 + loading / snapshot.horizon_seconds)
            yield round(paid, 9), round(sum(seconds) + sum(sent.values()), 9), len(moved)


def compared(score):
    return score.paid_seconds, score.latency_seconds, score.moves


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_the_search_finds_what_looking_at_all_finds(data):
    snapshot = data.draw(snapshots())
    current = data.draw(currents(snapshot))
    found = best_partition(snapshot, current)
    assert found.proven
    best = min(all_scores(snapshot, current), default=None)
    if best is None:
        assert found.assignment is None
    else:
        assert compared(snapshot.score(found.assignment, current)) == pytest.approx(best)
        assert snapshot.fits(found.assignment)


@settings(deadline=None, max_examples=100)
@given(snapshots(max_memory=10_000, least_interference=4, max_devices=4, degrees=[{1: 1.0}], free=True))
def test_the_heuristic_keeps_its_bound(snapshot):
    found = best_partition(snapshot, max_nodes=0)
    assert found.assignment is not None
    best, _, _ = min(all_scores(snapshot, None))
    devices, worst = len(snapshot.devices), max(stage.interference for stage in snapshot.stages)
    bound = worst * 2 * devices / (devices + 1)
    assert snapshot.score(found.assignment).busiest_seconds <= bound * best + 1e-9


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(0, 40))
def test_cut_short_it_fits_and_is_no_worse_than_what_runs(data, max_nodes):
    snapshot = data.draw(snapshots())
    current = data.draw(currents(snapshot))
    found = best_partition(snapshot, current, max_nodes=max_nodes)
    scores = list(all_scores(snapshot, current))
    if found.assignment is None:
        assert not found.proven or not scores
        assert current is None or not snapshot.fits(current)
        return
    assert snapshot.covers(found.assignment)
    assert snapshot.fits(found.assignment)
    score = snapshot.score(found.assignment, current)
    if current is not None and snapshot.fits(current):
        assert score.paid_seconds <= snapshot.score(current).busiest_seconds + 1e-9
    if found.proven:
        assert compared(score) == pytest.approx(min(scores))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.lists(st.integers(0, 24), min_size=2, max_size=30))
def test_what_is_not_forced_comes_once_in_a_cooldown(data, memory):
    """The memory of the first device goes up and down as drawn, one step a second."""
    base = data.draw(snapshots(max_memory=40, max_stages=4))
    partitioner = Partitioner(min_gain=0.05, cooldown_seconds=5.0)
    current, changed_at = None, None
    for now, first in enumerate(memory):
        devices = (Device("A", first, base.devices[0].speed), *base.devices[1:])
        snapshot = replace(base, devices=devices)
        plan = partitioner.plan(snapshot, current, float(now))
        if plan.assignment is None:
            assert plan.shortage.missing_bytes > 0 or not all(snapshot.places.values())
            assert not list(all_scores(snapshot, None))
            continue  # what ran goes on running, as well as it can
        assert snapshot.fits(plan.assignment)
        if plan.assignment == current:
            assert plan.moves == 0
            continue
        if plan.reason is PartitionReason.BETTER:
            assert now - changed_at >= 5.0
            assert snapshot.fits(plan.assignment, headroom=0.1)
            before, after = snapshot.score(current), snapshot.score(plan.assignment, current)
            assert before.busiest_seconds / after.busiest_seconds > 1.05
            loading = after.move_share * snapshot.horizon_seconds
            gained = snapshot.horizon_seconds * (1 / after.busiest_seconds - 1 / before.busiest_seconds)
            assert gained > loading / before.busiest_seconds, "the horizon pays for the moves"
        else:
            assert plan.reason in (PartitionReason.FIRST, PartitionReason.PRESSURE)
            assert current is None or not snapshot.fits(current)
        current, changed_at = plan.assignment, now


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_the_same_facts_give_the_same_plan_and_a_reason_for_each_stage(data):
    snapshot = data.draw(snapshots())
    current = data.draw(currents(snapshot))
    plan, again = (Partitioner().plan(snapshot, current, 0.0) for _ in range(2))
    assert plan == again
    if plan.assignment is None:
        assert plan.decisions == ()
        return
    assert snapshot.covers(plan.assignment)
    assert snapshot.fits(plan.assignment)
    assert [(one.stage_id, one.place) for one in plan.decisions] == sorted(plan.assignment.items())
    if current is not None:
        left = {one.stage_id for one in plan.decisions if one.action is StageAction.LEFT}
        assert left == {one for one, place in current.items() if plan.assignment[one] == place}
        assert plan.moves == len(plan.changes)
        if snapshot.fits(current):
            before, after = snapshot.score(current, current), snapshot.score(plan.assignment, current)
            assert plan.assignment == current or better(after, before)

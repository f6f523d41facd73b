"""The search against all assignments of small graphs, and the heuristic against its bound."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.graph.partition import (
    Device,
    Partitioner,
    PartitionReason,
    PartitionSnapshot,
    StageProfile,
    best_partition,
)

NAMES = "ABCD"


@st.composite
def snapshots(draw, max_memory=30, least_interference=1, most_interference=8, max_devices=3, max_stages=5):
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
        )
        for n in range(draw(st.integers(1, max_stages)))
    )
    pairs = [(one, other) for one in range(len(stages)) for other in range(one + 1, len(stages))]
    transfers = draw(st.dictionaries(st.sampled_from(pairs), st.integers(0, 4).map(lambda n: n / 8))) if pairs else {}
    ways = [(a.device_id, b.device_id) for a in devices for b in devices if a is not b]
    distances = draw(st.dictionaries(st.sampled_from(ways), st.sampled_from([0.5, 2.0]), max_size=2)) if ways else {}
    return PartitionSnapshot(devices, stages, transfers, distances, batch=draw(st.integers(1, 3)))


def currents(snapshot):
    names = st.sampled_from([device.device_id for device in snapshot.devices])
    return st.none() | st.fixed_dictionaries({stage.stage_id: names for stage in snapshot.stages})


def all_scores(snapshot, current):
    """Yield the scores of all assignments that fit, computed in another way than in the code under test."""
    for places in product(range(len(snapshot.devices)), repeat=len(snapshot.stages)):
        latency, busiest, fits = 0.0, 0.0, True
        for n, device in enumerate(snapshot.devices):
            on = [stage for stage, place in zip(snapshot.stages, places, strict=True) if place == n]
            seconds = sum(one.seconds * one.interference if len(on) > 1 else one.seconds for one in on) / device.speed
            latency, busiest = latency + seconds, max(busiest, seconds)
            fits &= sum(one.weights_bytes + one.activation_bytes * snapshot.batch for one in on) <= device.memory_bytes
        for (one, other), seconds in snapshot.transfers.items():
            where = tuple(snapshot.devices[places[stage]].device_id for stage in (one, other))
            if where[0] != where[1]:
                latency += seconds * snapshot.distances.get(where, 1.0)
        moves = sum(current[n] != snapshot.devices[place].device_id for n, place in enumerate(places)) if current else 0
        if fits:
            yield round(busiest, 9), round(latency, 9), moves


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
        assert tuple(snapshot.score(found.assignment, current)) == pytest.approx(best)
        assert snapshot.fits(found.assignment)


@settings(deadline=None, max_examples=100)
@given(snapshots(max_memory=10_000, least_interference=4, max_devices=4))
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
        assert score.busiest_seconds <= snapshot.score(current).busiest_seconds + 1e-9
    if found.proven:
        assert tuple(score) == pytest.approx(min(scores))


@settings(deadline=None, max_examples=60)
@given(st.data(), st.lists(st.integers(0, 24), min_size=2, max_size=30))
def test_what_is_not_forced_comes_once_in_a_cooldown(data, memory):
    """The memory of the first device goes up and down as drawn, one step a second."""
    base = data.draw(snapshots(max_memory=40, max_stages=4))
    partitioner = Partitioner(min_gain=0.05, cooldown_seconds=5.0)
    current, changed_at = None, None
    for now, first in enumerate(memory):
        devices = (Device("A", first, base.devices[0].speed), *base.devices[1:])
        snapshot = PartitionSnapshot(devices, base.stages, base.transfers, base.distances, base.batch)
        plan = partitioner.plan(snapshot, current, float(now))
        if plan.assignment is None:
            assert plan.shortage.missing_bytes > 0
            assert not list(all_scores(snapshot, None))
            continue  # what ran goes on running, as well as it can
        assert snapshot.fits(plan.assignment)
        if plan.assignment == current:
            assert plan.moves == 0
            continue
        if plan.reason is PartitionReason.BETTER:
            assert now - changed_at >= 5.0
            assert snapshot.fits(plan.assignment, headroom=0.1)
            gain = snapshot.score(current).busiest_seconds / snapshot.score(plan.assignment).busiest_seconds
            assert gain > 1.05
        else:
            assert plan.reason in (PartitionReason.FIRST, PartitionReason.PRESSURE)
            assert current is None or not snapshot.fits(current)
        current, changed_at = plan.assignment, now

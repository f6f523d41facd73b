"""Progressive batching: its rules as tables, and its promises as properties."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.resource.progressive import Batch, BatchReason, ProgressiveBatcher, Slice, Work


def sizes(batch):
    return {member.request_id: member.units for member in batch.members}


def run(batcher, left, target, real=1.0, batches=1):
    """Plan and run batches of ``left`` (name: units, of 0.01 s), each taking ``real`` of its estimate."""
    made = []
    for _ in range(batches):
        batch = batcher.plan([Work(name, units, 0.01) for name, units in left.items()], target)
        for member in batch.members:
            left[member.request_id] -= member.units
            if not left[member.request_id]:
                del left[member.request_id]
        batcher.observe(batch, batch.estimated_seconds * real)
        made.append(batch)
    return made


def test_slices_start_small_and_double_up_to_the_target():
    made = run(ProgressiveBatcher(), {"long": 1000}, target=0.1, batches=6)
    assert [sizes(batch)["long"] for batch in made] == [1, 2, 4, 8, 10, 10]
    assert [batch.reason.value for batch in made] == ["windows"] * 4 + ["target"] * 2
    assert made[-1].estimated_seconds == pytest.approx(0.1)


def test_after_a_batch_that_took_too_long_slices_halve_and_then_grow_by_one():
    batcher, left = ProgressiveBatcher(), {"long": 1000}
    run(batcher, left, target=0.1, batches=3)
    assert batcher.window("long") == 8
    batch = batcher.plan([Work("long", left["long"], 0.01)], 0.1)
    batcher.observe(batch, 0.11)
    assert batcher.window("long") == 4
    run(batcher, left, target=0.1, batches=2)
    assert batcher.window("long") == 6


def test_a_short_one_is_done_before_the_slices_of_a_long_one_grow():
    batcher, left = ProgressiveBatcher(), {"long": 1000}
    run(batcher, left, target=0.1, batches=5)
    left["short"] = 4
    made = run(batcher, left, target=0.1, batches=3)
    assert [sizes(batch) for batch in made] == [
        {"long": 9, "short": 1},
        {"long": 8, "short": 2},
        {"long": 9, "short": 1},
    ]
    assert "short" not in left


def test_batches_that_take_longer_than_they_should_become_smaller():
    batcher, left = ProgressiveBatcher(), {"long": 100_000}
    made = run(batcher, left, target=0.1, real=2.0, batches=1)
    assert batcher.slower == pytest.approx(1.2)
    for _ in range(60):
        batch = batcher.plan([Work("long", 1000, 0.01)], 0.1)
        batcher.observe(batch, 2 * 0.01 * sizes(batch)["long"])
        made.append(batch)
    assert batcher.slower == pytest.approx(2.0, rel=0.01)
    assert sizes(made[-1]) == {"long": 5}


def test_one_unit_goes_even_where_it_is_over_the_target():
    picture = Work.of_image("picture", steps=20, pixels=10**6, seconds_per_pixel_step=2e-7)
    text = Work.of_text("text", tokens=50, seconds_per_token=1e-3)
    batch = ProgressiveBatcher().plan([picture, text], 0.1)
    assert batch == Batch((Slice("picture", 1),), pytest.approx(0.2), 0.1, BatchReason.OVER_TARGET)


def test_those_over_the_target_and_those_that_are_not_take_turns():
    batcher = ProgressiveBatcher()
    works = [Work("picture", 20, 0.2), Work("text", 50, 1e-3, first_units=8)]
    made = []
    for _ in range(4):
        made.append(batcher.plan(works, 0.1))
        batcher.observe(made[-1], made[-1].estimated_seconds)
    assert [list(sizes(batch)) for batch in made] == [["picture"], ["text"]] * 2


def test_all_that_is_left_and_nothing_at_all():
    batcher = ProgressiveBatcher(base_seconds=0.05)
    assert batcher.plan([], 0.1) == Batch((), 0.0, 0.1, BatchReason.NOTHING_WAITS)
    batch = batcher.plan([Work.of_text("a", 3, 0.01), Work.of_text("b", 2, 0.01)], 0.1)
    assert (sizes(batch), batch.reason) == ({"a": 3, "b": 2}, BatchReason.ALL_LEFT)
    assert batch.estimated_seconds == pytest.approx(0.1)


def test_no_more_members_than_may_be_and_the_others_next():
    batcher, works = ProgressiveBatcher(max_members=2), [Work(name, 9, 0.001) for name in "abc"]
    made = [batcher.plan(works, 1.0) for _ in range(3)]
    assert [list(sizes(batch)) for batch in made] == [["a", "b"], ["c", "a"], ["b", "c"]]
    assert {batch.reason for batch in made} == {BatchReason.MEMBERS}


def test_who_has_left_is_forgotten():
    batcher = ProgressiveBatcher()
    batch = batcher.plan([Work("a", 9, 0.01)], 1.0)
    batcher.plan([], 1.0)
    batcher.observe(batch, 0.01)
    assert batcher.window("a") is None


works = st.builds(Work, st.just(""), st.integers(1, 30), st.floats(0, 0.3), st.integers(1, 20))


@settings(deadline=None, max_examples=40)
@given(st.lists(works, min_size=1, max_size=6), st.floats(0.01, 1), st.integers(1, 8), st.integers(0, 2**32))
def test_every_unit_is_done_once_nobody_starves_and_the_target_holds(given_works, target, max_members, seed):
    batcher, dice = ProgressiveBatcher(max_members=max_members), random.Random(seed)
    left = {f"r{i}": (work, work.units) for i, work in enumerate(given_works)}
    total, done = sum(work.units for work in given_works), 0
    gap = dict.fromkeys(left, 0)
    while left:
        waiting = [Work(name, units, work.seconds_per_unit, work.first_units) for name, (work, units) in left.items()]
        slower = batcher.slower
        batch = batcher.plan(waiting, target)
        assert 1 <= len(batch.members) <= max_members
        one = slower * max(left[member.request_id][0].seconds_per_unit for member in batch.members)
        if one <= target:
            assert batch.estimated_seconds <= target * (1 + 1e-9)
        for name in left:
            gap[name] += 1
        for member in batch.members:
            assert 1 <= member.units <= left[member.request_id][1]
            done += member.units
            assert gap[member.request_id] <= len(given_works)
            gap[member.request_id] = 0
            work, units = left.pop(member.request_id)
            if units > member.units:
                left[member.request_id] = work, units - member.units
        assert max((gap[name] for name in left), default=0) < len(given_works)
        batcher.observe(batch, batch.estimated_seconds * dice.choice([0.5, 1, 1, 3]))
    assert done == total


def test_bad_input_is_refused_by_name():
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="seconds_per_unit"):
            Work("a", 1, bad)
        with pytest.raises(ValueError, match="target_seconds"):
            ProgressiveBatcher().plan([], bad)
        with pytest.raises(ValueError, match="seconds"):
            ProgressiveBatcher().observe(Batch((), 1.0, 1.0, BatchReason.TARGET), bad)
        with pytest.raises(ConfigError, match="base_seconds"):
            ProgressiveBatcher(base_seconds=bad)
    for units in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="units"):
            Work("a", units[0], 1.0, units[1])
    with pytest.raises(ConfigError, match="max_members"):
        ProgressiveBatcher(max_members=0)
    with pytest.raises(ValueError, match="own request_id"):
        ProgressiveBatcher().plan([Work("a", 1, 1.0)] * 2, 1.0)

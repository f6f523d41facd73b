"""Rules of `StagePlacement`, one by one."""

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.stage_options.graph import PartitionOptions
from vllm_omni_sched.core.pipeline.placement import (
    CHECK_SECONDS,
    Decision,
    PlacedStage,
    StagePlacement,
    first_plan,
)
from vllm_omni_sched.graph.partition import PartitionReason

NAMES = {0: "thinker", 1: "talker", 2: "vocoder"}


def options(*memory: int, speeds: tuple[float, ...] = (), **more: object) -> PartitionOptions:
    devices = {
        str(number): {"memory_bytes": each, "speed": speed}
        for number, (each, speed) in enumerate(zip(memory, speeds or [1.0] * len(memory), strict=True))
    }
    return PartitionOptions.model_validate({"enabled": True, "devices": devices, "cooldown_seconds": 0.0, **more})


def placement(*memory: int, **more: object) -> StagePlacement:
    return StagePlacement(options(*memory, **more), NAMES)


def stages(on: str, nbytes: int = 40, seconds: float | None = 1.0) -> list[PlacedStage]:
    """Return stages that are alike, the n-th on the n-th device."""
    return [PlacedStage(number, device, nbytes, seconds) for number, device in enumerate(on)]


def reason(decision: Decision) -> PartitionReason:
    assert decision.plan is not None
    return decision.plan.reason


@pytest.mark.parametrize("unknown", [{"nbytes": 0}, {"seconds": None}])
def test_nothing_is_planned_before_all_needs_are_known(unknown: dict[str, None]) -> None:
    assert placement(100, 100).check(stages("0") + stages("00", **unknown)[1:], {}, 0.0) == Decision()


def test_a_profile_sets_the_seconds_and_the_least_memory() -> None:
    profiles = {"talker": {"memory_bytes": 70, "seconds": 1.0}}
    found = placement(100, 100, profiles=profiles, min_gain=10.0).check(
        [PlacedStage(0, "0", 40, 1.0), PlacedStage(1, "0", 10, None)], {}, 0.0
    )
    assert reason(found) is PartitionReason.PRESSURE


def test_measured_seconds_are_those_of_the_present_device() -> None:
    """Two seconds on a device of speed 4 are eight on one of speed 1: nothing is gained by moving there."""
    found = placement(100, 100, speeds=(4.0, 1.0)).check([PlacedStage(0, "0", 40, 2.0)], {}, 0.0)
    assert reason(found) is PartitionReason.HELD
    assert found.plan is not None
    assert found.plan.latency_seconds == 2.0


def test_memory_of_other_stages_is_not_available() -> None:
    assert reason(placement(100, 100).check(stages("00"), {"1": 70}, 0.0)) is PartitionReason.HELD
    assert reason(placement(100, 100).check(stages("00"), {"1": 40}, 0.0)) is PartitionReason.BETTER


def test_a_check_is_due_after_the_interval_and_not_during_a_move() -> None:
    one = placement(100, 100)
    assert one.is_due(0.0, moving=False)
    one.check(stages("0"), {}, 0.0)
    assert not one.is_due(CHECK_SECONDS - 0.1, moving=False)
    assert one.is_due(CHECK_SECONDS, moving=False)
    assert not one.is_due(CHECK_SECONDS, moving=True)


def test_one_stage_moves_at_a_time_and_the_plan_goes_on_after_it() -> None:
    one = placement(100, 100, 100, min_gain=0.6)
    first = one.check(stages("000", nbytes=30), {}, 0.0)
    assert reason(first) is PartitionReason.BETTER
    assert first.plan is not None
    assert first.plan.moves == 2
    assert first.move is not None
    one.ended(moved=True)
    on = ["0", "0", "0"]
    on[first.move.stage_id] = first.move.target
    second = one.check(stages("".join(on), nbytes=30), {}, 5.0)
    assert second.plan is None, "it is a move of the first plan"
    assert second.move is not None
    on[second.move.stage_id] = second.move.target
    assert sorted(on) == ["0", "1", "2"]
    one.ended(moved=True)
    assert reason(one.check(stages("".join(on), nbytes=30), {}, 10.0)) is PartitionReason.HELD


def test_a_plan_is_dropped_after_a_move_that_failed() -> None:
    one = placement(100, 100, 100)
    assert one.check(stages("000", nbytes=30), {}, 0.0).move is not None
    one.ended(moved=False)
    again = one.check(stages("000", nbytes=30), {}, 5.0)
    assert reason(again) is PartitionReason.BETTER, "planned anew"


def test_a_failed_move_waits_for_the_cooldown() -> None:
    one = placement(100, 100, cooldown_seconds=60.0)
    assert one.check(stages("00"), {}, 0.0).move is not None
    one.ended(moved=False)
    waits = one.check(stages("00"), {}, 59.0)
    assert reason(waits) is PartitionReason.COOLDOWN
    assert waits.move is None
    assert one.check(stages("00"), {}, 60.0).move is not None


@pytest.mark.parametrize("changed", [stages("01", nbytes=30), stages("010", nbytes=60)], ids=["gone", "grown"])
def test_a_plan_is_dropped_if_it_no_longer_applies(changed: list[PlacedStage]) -> None:
    one = placement(100, 100, 100)
    assert one.check(stages("000", nbytes=30), {}, 0.0).move is not None
    one.ended(moved=True)
    found = one.check(changed, {"2": 70}, 5.0)
    assert found.plan is not None


def test_the_target_needs_room_before_the_old_replica_stops() -> None:
    """Two full devices whose stages should swap: neither can start beside the other."""
    one = placement(100, 100, speeds=(1.0, 4.0))
    swap = [PlacedStage(0, "0", 80, 9.0), PlacedStage(1, "1", 80, 0.25)]
    found = one.check(swap, {}, 0.0)
    assert reason(found) is PartitionReason.BETTER
    assert found.move is None
    assert one.refused() == Decision()


def test_stages_start_by_the_best_plan_of_their_profiles() -> None:
    one = options(100, 100, profiles={number: {"memory_bytes": 40, "seconds": 1.0} for number in range(2)})
    plan = first_plan(one, {number: one.profile_of(number) for number in range(2)}, {}, {}, splits=False)
    assert plan is not None
    assert plan.assignment is not None
    assert sorted(plan.assignment.values()) == ["0", "1"]
    assert first_plan(one, {0: one.profile_of(0), 7: None}, {}, {}, splits=False) is None
    assert first_plan(one, {}, {}, {}, splits=False) is None
    with pytest.raises(ConfigError, match=r"graph\.partition.*name more devices"):
        first_plan(one, {0: one.profile_of(0)}, {"0": 90, "1": 90}, {}, splits=False)


SPLITS = {"memory_bytes": 60, "seconds": 2.0, "tensor_parallel": {2: 0.9}}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"profiles": {"a": SPLITS | {"tensor_parallel": {1: 0.9}}}},
            "'tensor_parallel' must give degrees of 2",
        ),
        ({"profiles": {"a": SPLITS | {"tensor_parallel": {2: 1.1}}}}, "at most 1, got 2: 1.1"),
        (
            {"profiles": {"a": SPLITS | {"weights_bytes": 61}}},
            "'weights_bytes' must not be above .*: 61 > 60",
        ),
        ({"payload_bytes": {"thinker": 1}}, "'payload_bytes.thinker' must name two ends, such as 'thinker->talker'"),
        ({"links": {"0->0": 1}}, "'links.0->0' must name two ends, such as '0->1'"),
        ({"links": {"0->7": 1}}, "'links.0->7': there is no device '7' in 'devices'; it has 0"),
        ({"devices": {"0,1": {"memory_bytes": 1}}}, "'devices.0,1' must be the id of one device"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        options(100, **given)

"""What dies, comes back, and is lost, from a scenario's words to its result."""

from pathlib import Path

import pytest

from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import load
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.study.evaluate import over_time

STAGES = """
name = "deaths"
duration_seconds = 40.0
[workload]
kind = "poisson"
rate = 2.0
[[stages]]
name = "first"
kind = "servers"
per_replica = 4
replicas = 4
seconds = 0.5
service = "exponential"
[[stages]]
name = "second"
kind = "servers"
per_replica = 4
replicas = 8
seconds = 3.0
service = "exponential"
[[failures]]
stage = "first"
every_seconds = 8.0
restart_seconds = 5.0
[[failures]]
stage = "second"
every_seconds = 6.0
restart_seconds = 5.0
[[failures]]
stage = "second"
kind = "rack"
rack_replicas = 4
at_seconds = [15.0, 30.0]
restart_seconds = 5.0
"""
RECOVERY = {"orchestration.runtime.recovery.enabled": True}


def scenario(tmp_path: Path, **overrides: object) -> Scenario:
    path = tmp_path / "deaths.toml"
    path.write_text(STAGES)
    return load(path, overrides)


def deaths(result) -> int:
    return sum(count for name, count in result.counters.items() if name.endswith("_deaths"))


FEWER = {
    "stages.second.seconds": 1.0,
    "failures": [
        {"stage": "first", "every_seconds": 20.0, "restart_seconds": 5.0},
        {"stage": "second", "every_seconds": 15.0, "restart_seconds": 5.0},
        {"stage": "second", "kind": "rack", "rack_replicas": 4, "at_seconds": [20.0], "restart_seconds": 5.0},
    ],
    **RECOVERY,
}


@pytest.mark.parametrize("seed", range(20))
def test_with_recovery_no_request_is_lost(tmp_path, seed):
    result = simulate(scenario(tmp_path, seed=seed, **FEWER))
    assert deaths(result) >= 4
    assert result.lost == 0
    assert [record.number for record in result.records if record.outcome != "done"] == []
    assert sorted(record.number for record in result.records) == list(range(len(result.records)))


@pytest.mark.parametrize("seed", range(5))
def test_however_much_dies_only_who_met_three_deaths_is_given_up(tmp_path, seed):
    result = simulate(scenario(tmp_path, seed=seed, **RECOVERY))
    assert deaths(result) >= 8
    assert result.lost == 0
    assert {record.attempts for record in result.records if record.outcome != "done"} <= {3}
    assert max(record.attempts for record in result.records) > 1


def test_without_recovery_what_a_replica_had_fails_and_respawning_brings_only_the_replica_back(tmp_path):
    stock = simulate(scenario(tmp_path))
    respawned = simulate(scenario(tmp_path, respawn=True))
    failed = [sum(record.outcome != "done" for record in result.records) for result in (stock, respawned)]
    assert failed[0] > failed[1] > 0
    assert stock.availability["second"]["serving"] < 0.5 < respawned.availability["second"]["serving"] < 1


def test_requests_fail_with_recovery_where_nobody_is_there_for_longer_than_they_may_wait(tmp_path):
    gone = {
        "failures": [
            {"stage": "second", "kind": "rack", "rack_replicas": 8, "at_seconds": [10.0], "restart_seconds": 15.0}
        ],
        **RECOVERY,
    }
    waits = simulate(scenario(tmp_path, **gone))
    assert [record for record in waits.records if record.outcome != "done"] == []
    assert waits.availability["second"]["seconds_without_any"] == pytest.approx(16.0)
    short = simulate(scenario(tmp_path, **gone, **{"orchestration.runtime.recovery.max_wait_seconds": 5.0}))
    failed = [record for record in short.records if record.outcome != "done"]
    assert failed
    assert any(record.arrival > 11.0 for record in failed)  # in the queue, where they wait as long as others
    assert all(record.arrival < 21.0 for record in failed)  # 5 s before the replicas are back


def test_a_rack_that_dies_at_once_is_one_death_for_its_requests(tmp_path):
    rack = {"stage": "second", "kind": "rack", "rack_replicas": 4, "at_seconds": [10.0], "restart_seconds": 5.0}
    result = simulate(scenario(tmp_path, failures=[rack], **RECOVERY))
    assert result.counters["second_deaths"] == 4
    assert {record.attempts for record in result.records} == {1, 2}


def test_bins_of_a_run_add_up(tmp_path):
    result = simulate(scenario(tmp_path, warm_up_seconds=10.0))
    columns = over_time(result, 10.0, 40.0, bins=10)
    assert columns["seconds"] == [10.0 + 3 * at for at in range(10)]
    assert sum(columns["requests"]) == len(result.records)
    assert sum(columns["failed"]) == sum(record.outcome != "done" for record in result.records)
    within = sum(part * n for part, n in zip(columns["within_slo"], columns["requests"], strict=True))
    assert within == pytest.approx(result.within(), abs=0.1)
    assert columns["serving second"][0] >= columns["serving second"][-1]

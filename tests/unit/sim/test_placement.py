"""Stages on shared devices: they slow each other down, and move as `StagePlacement` decides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.build.cluster import Cluster
from vllm_omni_sched.sim.costs.hardware import device
from vllm_omni_sched.sim.costs.models import model
from vllm_omni_sched.sim.costs.roofline import RooflineCosts
from vllm_omni_sched.sim.device import Device, DeviceShare
from vllm_omni_sched.sim.engine.limits import EngineLimits, make_core
from vllm_omni_sched.sim.engine.placed import PlacedEngine
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.pools.placement import MoveRecord
from vllm_omni_sched.sim.result import Result
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.server import Job, Server
from vllm_omni_sched.sim.servers.encoder import PlacedEncoder
from vllm_omni_sched.sim.servers.queue import PlacedQueue
from vllm_omni_sched.sim.work import Item, Request

pytestmark = pytest.mark.usefixtures("validated_core")

TWO = {"0": {"memory_bytes": 100}, "1": {"memory_bytes": 100}}
POISSON = {"kind": "poisson", "rate": 0.7}


def server(name: str, on: str | None = "0", **more: Any) -> dict[str, Any]:
    stage = {"name": name, "kind": "servers", "devices": 1, "seconds": 1.0, **more}
    return stage if on is None else {"memory_bytes": 40, "start_seconds": 10.0, "placed_on": on, **stage}


def scenario(
    *stages: dict[str, Any], partition: dict[str, Any] | None = None, runtime: dict[str, Any] | None = None, **more: Any
) -> Scenario:
    options = {"enabled": True, "devices": TWO, **(partition or {})}
    return Scenario.model_validate(
        {
            "name": "placed",
            "duration_seconds": 300.0,
            "workload": POISSON,
            "stages": list(stages),
            "orchestration": {"graph": {"partition": options}, "runtime": runtime or {}},
            **more,
        }
    )


def told(moves: Sequence[MoveRecord]) -> list[tuple[str, str, str, str, str]]:
    return [(one.stage, one.source, one.target, one.reason, one.outcome) for one in moves]


def moved(result: Result) -> list[tuple[str, str, str, str, str]]:
    return told(result.moves)


# ---- a device and its shares


def shares() -> tuple[Simulator, list[DeviceShare], list[tuple[str, float]]]:
    sim = Simulator()
    shared = Device(sim, 1.0)
    return sim, [DeviceShare(shared), DeviceShare(shared)], []


def test_replicas_that_have_work_share_their_device_evenly() -> None:
    sim, (one, other), ends = shares()
    one.run(1.0, lambda name: ends.append((name, sim.now)), "one")
    other.run(3.0, lambda name: ends.append((name, sim.now)), "other")
    sim.run()
    assert ends == [("one", 2.0), ("other", 4.0)]
    assert (one.busy_seconds(), other.busy_seconds()) == (1.0, 3.0), "seconds of the device, without those of others"


def test_work_that_is_stopped_leaves_the_device_to_others() -> None:
    sim, (one, other), ends = shares()
    one.run(5.0, lambda name: ends.append((name, sim.now)), "one")
    other.run(2.0, lambda name: ends.append((name, sim.now)), "other")
    sim.at(2.0, lambda _: one.stop())
    sim.run()
    assert ends == [("other", 3.0)]
    assert one.busy_seconds() == 1.0
    one.stop()


@pytest.mark.parametrize("how", ["kill", "abort"])
@pytest.mark.parametrize("kind", ["queue", "encoder", "engine"])
def test_a_server_leaves_its_device_to_others_when_it_has_no_work_any_more(kind: str, how: str) -> None:
    sim, (one, other), ends = shares()
    costs = RooflineCosts(model("qwen2.5-vl-7b"), device("a100-80gb"))
    done: list[Job] = []
    job = Job(Request(0, 0.0, 100, 1000, (Item("image", 4000, 1),)), 0)
    made: Server
    if kind == "queue":
        made = PlacedQueue(sim, done.append, lambda job, rng: 100.0, random.Random(1), one)
    elif kind == "encoder":
        made = PlacedEncoder(sim, done.append, costs, 8, one)
    else:
        limits = EngineLimits(100_000, 8, 8192, 8192, 8192)
        core = make_core(OmniSchedConfig(), limits)
        made = PlacedEngine(sim, costs, limits, core, done.append, Histogram(), one)
    made.submit(job)
    while not one.busy_seconds():
        sim.run(sim.now + 0.01)
    if how == "kill":
        assert made.kill() == [job]
    else:
        made.abort(job)
        sim.run(sim.now + 10.0)  # a batch, or a step, of aborted work is still completed
    began = sim.now
    other.run(1.0, lambda name: ends.append((name, sim.now)), "other")
    sim.run(began + 10.0)
    assert ends == [("other", pytest.approx(began + 1.0))]
    assert done == []
    assert made.in_flight == 0


# ---- stages alone on a device are as on accelerators of their own

ENGINE = {"name": "llm", "kind": "engine", "model": "qwen2.5-vl-7b"}
ENCODER = {"name": "encoder", "kind": "encoder", "model": "qwen2.5-vl-7b"}
KINDS: dict[str, list[dict[str, Any]]] = {
    "servers": [server("dit", None, seconds={"distribution": "exponential", "mean": 1.0})],
    "engine": [ENGINE],
    "encoder and engine": [ENCODER, ENGINE],
}


def kinds(case: str, placed: bool, speed: float = 1.0) -> Result:
    devices = {str(at): {"memory_bytes": 10**12, "speed": speed} for at in range(2)}
    stages = [stage | ({"placed_on": str(at)} if placed else {}) for at, stage in enumerate(KINDS[case])]
    workload = POISSON if case == "servers" else {"kind": "servegen-mm-image", "rate": 2.0}
    partition = {"enabled": False, "devices": devices}
    return simulate(scenario(*stages, partition=partition, workload=workload, duration_seconds=60.0))


@pytest.mark.parametrize("case", KINDS)
def test_a_stage_alone_on_a_device_is_as_fast_as_on_its_own_accelerator(case: str) -> None:
    alone, placed = kinds(case, placed=False), kinds(case, placed=True)
    assert len(alone.records) > 20
    assert [one.end for one in placed.records] == pytest.approx([one.end for one in alone.records])
    assert [one.first for one in placed.records] == pytest.approx([one.first for one in alone.records])
    for stage, busy in alone.busy_seconds.items():
        assert placed.busy_seconds[stage] == pytest.approx(busy)


@pytest.mark.parametrize("case", KINDS)
def test_work_takes_longer_on_a_slow_device(case: str) -> None:
    usual, slow = kinds(case, placed=True), kinds(case, placed=True, speed=0.25)
    assert len(usual.records) == len(slow.records)
    assert sum(one.end - one.arrival for one in slow.records) > 2 * sum(one.end - one.arrival for one in usual.records)


# ---- plans and moves


def test_a_stage_leaves_a_device_that_two_overload() -> None:
    stages = server("thinker"), server("talker")
    stay = simulate(scenario(*stages, partition={"enabled": False}, drain_seconds=0.0))
    move = simulate(scenario(*stages, drain_seconds=0.0))
    assert moved(stay) == []
    assert stay.devices == {"thinker": ["0"], "talker": ["0"]}
    assert moved(move) == [("thinker", "0", "1", "better", "moved")]
    assert move.devices == {"thinker": ["1"], "talker": ["0"]}
    assert move.lost < 10 < 50 < stay.lost, "requests that are still there at the end"
    assert move.counters["partition_better"] == move.counters["thinker_moved"] == 1
    assert move.counters["thinker_started"] == move.counters["thinker_stopped"] == 1
    assert move.summary()["placement"]["moves"][0]["target"] == "1"


def test_no_request_fails_or_runs_twice_because_of_a_move() -> None:
    result = simulate(scenario(server("thinker"), server("talker")))
    assert moved(result)
    assert all(one.outcome.value == "done" and one.attempts == 1 for one in result.records)


def test_a_stage_leaves_a_slow_device() -> None:
    devices = {"0": {"memory_bytes": 100, "speed": 0.5}, "1": {"memory_bytes": 100}}
    result = simulate(scenario(server("only"), partition={"devices": devices}))
    assert moved(result) == [("only", "0", "1", "better", "moved")]


def test_a_stage_with_a_profile_of_each_starts_where_the_plan_says() -> None:
    profiles = {name: {"memory_bytes": 40, "seconds": 1.0} for name in ("thinker", "talker")}
    result = simulate(scenario(server("thinker"), server("talker"), partition={"profiles": profiles}))
    assert sorted(result.devices["thinker"] + result.devices["talker"]) == ["0", "1"]
    assert moved(result) == []


def test_engines_are_measured_and_hold_the_memory_that_vllm_takes() -> None:
    devices = {str(at): {"memory_bytes": 80_000_000_000} for at in range(2)}
    half = {"placed_on": "0", "gpu_memory_utilization": 0.45, "start_seconds": 10.0}
    result = simulate(
        scenario(
            ENGINE | half,
            ENGINE | half | {"name": "talker", "prompt_tokens": 100, "tokens_each": 2.0},
            partition={"devices": devices},
            workload={"kind": "servegen-mm-image", "rate": 1.0},
            duration_seconds=120.0,
        )
    )
    assert [one[2:] for one in moved(result)] == [("1", "better", "moved")]
    assert sum(result.device_seconds.values()) == pytest.approx(2 * result.seconds), "each device counts once"


def test_a_stage_without_a_device_is_not_placed() -> None:
    several = server("several", None, replicas=2)
    result = simulate(scenario(server("thinker"), several, server("talker")))
    assert moved(result) == [("thinker", "0", "1", "better", "moved")]
    assert result.devices.keys() == {"thinker", "talker"}


# ---- stages on several devices, and what transfers cost

THREE = {str(at): {"memory_bytes": 100} for at in range(3)}


def seconds_each(result: Result) -> float:
    """Return the mean simulated seconds of a request."""
    assert not result.lost
    return sum(one.end - one.arrival for one in result.records) / len(result.records)


def test_a_plan_that_counts_transfers_answers_sooner_than_one_that_does_not() -> None:
    """Device 0 has a slow link to device 1, which has a quick one to device 2."""
    profiles = {name: {"memory_bytes": 60, "seconds": 1.0} for name in ("thinker", "talker")}
    both = {
        "devices": THREE,
        "profiles": profiles,
        "payload_bytes": {"thinker->talker": 100.0},
        "link_bytes_per_second": 50.0,
        "links": {"1->2": 1000.0},
    }
    stages = server("thinker", memory_bytes=60), server("talker", "1", memory_bytes=60)
    workload = {"kind": "poisson", "rate": 0.3}
    blind = simulate(scenario(*stages, partition=both | {"enabled": False}, workload=workload))
    aware = simulate(scenario(*stages, partition=both, workload=workload))
    assert blind.devices == {"thinker": ["0"], "talker": ["1"]}, "equal stages on equal devices, if transfers are free"
    assert {*aware.devices["thinker"], *aware.devices["talker"]} == {"1", "2"}
    assert len(aware.records) == len(blind.records)
    assert seconds_each(blind) - seconds_each(aware) > 1.8, "each payload takes 2 s over the slow link, and 0.1 s"


def test_payloads_over_a_link_take_turns() -> None:
    options = {
        "enabled": False,
        "devices": TWO,
        "payload_bytes": {"thinker->talker": 100.0},
        "link_bytes_per_second": 10.0,
    }
    stages = server("thinker", seconds=0.1), server("talker", "1", seconds=0.1)
    burst = {"kind": "poisson", "rate": 2.0, "arrival_cv": 0.0}
    result = simulate(scenario(*stages, partition=options, workload=burst, duration_seconds=5.0, drain_seconds=200.0))
    ends = sorted(one.end for one in result.records)
    assert len(ends) > 5
    assert [later - end for end, later in itertools.pairwise(ends)] == pytest.approx([10.0] * (len(ends) - 1))


SPLITS = {"memory_bytes": 40, "seconds": 2.0, "tensor_parallel": {2: 0.9}}
SHORT = {"memory_bytes": 40, "seconds": 0.1}


def test_a_stage_that_is_split_keeps_up_where_one_device_does_not() -> None:
    stages = server("thinker", seconds=2.0), server("talker", seconds=0.1)
    whole = {"profiles": {"thinker": SPLITS | {"tensor_parallel": {}}, "talker": SHORT}}
    one = simulate(scenario(*stages, partition=whole, drain_seconds=0.0))
    two = simulate(scenario(*stages, partition={"profiles": {"thinker": SPLITS, "talker": SHORT}}, drain_seconds=0.0))
    assert two.devices["thinker"] == ["0,1"]
    assert two.devices["talker"][0] in ("0", "1"), "it shares a device of the group"
    assert two.lost < 15 < 40 < one.lost, "requests that are still there at the end"
    assert moved(two) == []


def test_a_running_stage_is_split_only_if_that_is_allowed() -> None:
    stages = server("thinker", seconds=2.0), server("talker", seconds=0.1)
    given = {
        "profiles": {"thinker": SPLITS},
        "min_gain": 0.2,
    }  # the talker has none, so all start as placed
    kept = simulate(scenario(*stages, partition=given, drain_seconds=0.0))
    resized = simulate(scenario(*stages, partition=given | {"resize_running": True}, drain_seconds=0.0))
    assert moved(kept) == []
    assert moved(resized)[0] == ("thinker", "0", "0,1", "better", "moved")
    assert resized.lost < kept.lost


def test_a_replica_on_two_devices_ends_when_both_have_ended() -> None:
    sim = Simulator()
    ends: list[tuple[str, float]] = []
    first, second = Device(sim, 1.0), Device(sim, 0.5)
    both, alone = DeviceShare(first, second, speedup=1.8), DeviceShare(second)
    assert both.speed == pytest.approx(0.9)
    both.run(2.0, lambda name: ends.append((name, sim.now)), "both")
    alone.run(1.0, lambda name: ends.append((name, sim.now)), "alone")
    sim.run(2.5)
    assert both.busy_seconds() == 2.0
    sim.run()
    assert ends == [("alone", 2.0), ("both", 3.0)]
    both.run(5.0, lambda name: ends.append((name, sim.now)), "stopped")
    alone.run(9.0, lambda name: ends.append((name, sim.now)), "slow")
    sim.run(sim.now + 6.0)
    both.stop()
    sim.run()
    assert ends[2:] == [("slow", 15.0)]
    assert both.busy_seconds() == 7.0


# ---- moves that fail


def run_until_move(one: Scenario) -> tuple[Simulator, Cluster]:
    sim = Simulator()
    cluster = Cluster(one, sim, lambda record: None, None)
    assert cluster.mover is not None
    while not cluster.mover.moves:
        sim.run(sim.now + 1.0)
    return sim, cluster


def test_an_old_replica_that_is_not_empty_in_time_stays() -> None:
    long = server("long", seconds=50.0), server("talker", seconds=50.0)
    one = scenario(
        *long,
        partition={"cooldown_seconds": 1e6},
        runtime={"drain_seconds": 5.0},
        workload={"kind": "poisson", "rate": 0.03},
    )
    sim, cluster = run_until_move(one)
    mover, pool = cluster.mover, cluster.pipeline.pools[0]
    assert mover is not None
    while not mover.moves[0].outcome:
        sim.run(sim.now + 1.0)
    assert told(mover.moves)[0] == ("long", "0", "1", "better", "stayed")
    while len(pool.replicas) > 1:
        sim.run(sim.now + 1.0)
    sim.run(sim.now + 20.0)
    assert len(mover.moves) == 1, "the plan was dropped"
    assert [replica.index for replica in pool.live] == [0]
    assert cluster.placement()["long"] == ["0"]


@pytest.mark.parametrize(("dies", "outcome"), [("old", "died"), ("new", "stayed")])
def test_a_replica_dies_while_its_stage_moves(dies: str, outcome: str) -> None:
    long = server("long", seconds=20.0), server("talker", seconds=20.0)
    workload = {"kind": "poisson", "rate": 0.06}
    sim, cluster = run_until_move(scenario(*long, partition={"cooldown_seconds": 0.0}, workload=workload))
    mover, pool = cluster.mover, cluster.pipeline.pools[0]
    assert mover is not None
    while len(pool.replicas) < 2:
        sim.run(sim.now + 0.5)
    index = min(pool.replicas) if dies == "old" else max(pool.replicas)
    assert pool.kill(index)
    cluster.pipeline.notice(pool, index, 5.0)
    sim.run(sim.now + 60.0)
    assert told(mover.moves)[0][-1] == outcome
    assert {replica.index for replica in pool.live} == {0, 1}, "recovery has restarted it"
    assert len(mover.moves) == 1, "a stage with two replicas is not placed"


def test_a_replica_that_restarts_is_on_its_device() -> None:
    deaths = [{"stage": "thinker", "at_seconds": [100.0], "restart_seconds": 5.0}]
    result = simulate(scenario(server("thinker"), server("talker"), failures=deaths))
    assert result.counters["thinker_deaths"] == 1
    assert result.devices == {"thinker": ["1"], "talker": ["0"]}
    assert not result.lost


# ---- what cannot be simulated is refused


@pytest.mark.parametrize(
    ("stage", "more", "words"),
    [
        (server("a", "7"), {}, "'stages.a.placed_on': there is no device '7' in .*devices'; it has 0, 1"),
        (server("a", replicas=2), {}, "'stages.a.placed_on': only a stage with one replica"),
        (server("a"), {"autoscale": {"stage": "a", "maximum": 2}}, "'stages.a.placed_on': only a stage with one"),
        (server("a", devices=2), {}, "'stages.a.placed_on': only a replica on one device .* 'devices' is 2"),
        (server("a", per_replica=2), {}, "'stages.a.placed_on': .* set 'per_replica' to 1"),
        (ENGINE | {"placed_on": "0"}, {"policy": {"encode_ahead": True}}, "'stages.llm.placed_on': the lane"),
        (server("a"), {"cluster": {"host_cores": 2}}, "'stages.a.placed_on': 'cluster.host_cores'"),
        (server("a", memory_bytes=None), {}, "'stages.a.memory_bytes' is needed"),
        (server("a", None), {}, "'orchestration.graph.partition.enabled' is true, but no stage has 'placed_on'"),
        (
            server("a"),
            {"orchestration": {"graph": {"partition": {"devices": TWO, "payload_bytes": {"a->b": 1}}}}},
            "'orchestration.graph.partition.payload_bytes.a->b': there is no stage 'b'; stages are a",
        ),
        (server("a"), {"orchestration": None}, "'stages.a.placed_on': there is no device '0'"),
        (server("a"), {"cluster": {"devices_per_node": 1}}, r"the stages need 2 devices \(shared 2\)"),
    ],
)
def test_what_cannot_be_simulated_is_refused(stage: dict[str, Any], more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        scenario(stage, **more)


def test_stages_that_do_not_fit_on_their_device_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"stages a, b hold 120 bytes on device '0' .* which has 100: set"):
        simulate(scenario(server("a", memory_bytes=60), server("b", memory_bytes=60)))
    profiles = {"a": {"memory_bytes": 130, "seconds": 1.0}}
    with pytest.raises(ConfigError, match=r"\[orchestration\]: option 'graph.partition': .* stage 0 lacks 30 bytes"):
        simulate(scenario(server("a"), partition={"profiles": profiles}))

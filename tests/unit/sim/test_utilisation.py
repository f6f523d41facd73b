"""How busy stages were: never more than all the time, and the lane by its own name."""

from pathlib import Path

import pytest

from tests.support.sim_engine import PlainCosts, Run
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import load
from vllm_omni_sched.sim.work import Item, Request

SCENARIO = """
name = "busy"
seed = 2
duration_seconds = 30.0
warm_up_seconds = 1.0
[workload]
kind = "{workload}"
rate = {rate}
{more}
[[stages]]
name = "video"
kind = "video"
replicas = 2
per_replica = 3
{decoding}
[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
replicas = 2
{stage}
"""
AHEAD = "[policy]\nencode_ahead = true\n"
DEATHS = '[[failures]]\nstage = "llm"\nevery_seconds = 6.0\nrestart_seconds = 1.0\n'
MORE_DEATHS = DEATHS + DEATHS.replace("llm", "video")
VIDEOS, PICTURES = "video-clips", "servegen-mm-image"
CASES = {
    "overloaded": (PICTURES, 16.0, "", "", ""),
    "overloaded, with a lane": (PICTURES, 16.0, AHEAD, "", ""),
    "overloaded with videos, with a lane": (VIDEOS, 12.0, f"{AHEAD}encode_lane_min_share = 0.5\n", "", ""),
    "videos": (VIDEOS, 2.0, "", "", ""),
    "videos, each by one decoder, with a lane": (VIDEOS, 2.0, AHEAD, "collaborative = false", ""),
    "deaths": (PICTURES, 12.0, DEATHS, "", ""),
    "deaths, with a lane": (VIDEOS, 2.0, AHEAD + MORE_DEATHS, "", ""),
    "respawned": (VIDEOS, 2.0, "respawn = true\n", "", ""),
    "on processors": (PICTURES, 8.0, AHEAD, "", 'lane_on = "shared"'),
    "on processors of its own": (PICTURES, 8.0, AHEAD, "", 'lane_on = "beside"\nlane_items = 2'),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_busy_for_longer_than_it_is_there(case: str, tmp_path: Path) -> None:
    workload, rate, more, decoding, stage = CASES[case]
    path = tmp_path / "busy.toml"
    if more.startswith("respawn"):
        text, more = more + SCENARIO, DEATHS
    else:
        text = SCENARIO
    path.write_text(text.format(workload=workload, rate=rate, more=more, decoding=decoding, stage=stage))
    result = simulate(load(path))
    seen = [part for parts in result.summary()["utilisation"].values() for part in parts.values()]
    assert max(seen) > (0.02 if case.startswith("deaths") else 0.2)  # who dies at once does little
    assert min(seen) >= -1e-12
    assert max(seen) <= 1 + 1e-12
    assert result.operations is not None
    # the operations of a step count evenly over it, though it is slower beside the lane: the window may begin in one
    assert 0 <= result.operations <= (1.01 if case.endswith("with a lane") else 1)
    if case.startswith("overloaded"):
        assert result.operations > 0.3


@pytest.mark.parametrize("watched", [True, False])  # steps one by one, or several at once
def test_operations_are_those_of_the_steps_that_passed(watched: bool) -> None:
    run = Run(PlainCosts(base=0.5, decode=0.25, prefill=0.025, embed=0.01), watched=watched)
    seen = []
    # 0.5 + 2.5 s for the prompt, 1 s for the item, then 8 steps of 0.75 s of which 0.25 s are operations
    for at in (2.0, 4.0, 4.375, 7.0):
        run.sim.at(at, lambda _: seen.append(run.engine.operations_seconds()))
    run.serve([Request(0, 0.0, 0, 9, (Item("image", 100, 1),))])
    assert seen == pytest.approx([3.5 / 2, 3.5, 3.5 + 0.125, 3.5 + 1.0])
    assert run.engine.operations_seconds() == pytest.approx(3.5 + 8 * 0.25)


def test_operations_of_the_lane_are_those_at_full_width() -> None:
    run = Run(PlainCosts(base=0.1, embed=0.01), encode_ahead=True)
    items = tuple(Item("image", 100, content) for content in range(3))
    run.serve([Request(0, 0.0, 10, 20), Request(1, 0.05, 10, 1, items)])
    assert run.engine.operations_seconds() == pytest.approx(3.0)


def test_of_a_step_that_runs_only_what_has_passed_is_counted() -> None:
    run = Run(PlainCosts(base=1.0, embed=0.01), watched=False)
    seen = []
    for at in (0.5, 1.25, 1.75):
        run.sim.at(at, lambda _: seen.append(run.engine.busy_seconds()))
    run.serve([Request(0, 0.0, 10, 1, (Item("image", 100, 1),))])
    assert [one["llm"] + one["encode"] for one in seen] == pytest.approx([0.5, 1.25, 1.75])
    assert run.engine.busy_seconds() == pytest.approx({"llm": 1.0, "encode": 1.0})


def test_what_a_dead_engine_had_not_done_is_not_counted() -> None:
    run = Run(PlainCosts(base=1.0))
    run.sim.at(1.5, lambda _: run.engine.kill())
    run.serve([Request(0, 0.0, 10, 9)])
    assert run.engine.busy_seconds()["llm"] == pytest.approx(1.5)


def test_the_lane_is_busy_beside_steps_and_alone() -> None:
    run = Run(PlainCosts(base=0.1, embed=0.01), encode_ahead=True)
    # the first decodes for 2 s; the items of the second take the lane 3 s
    items = tuple(Item("image", 100, content) for content in range(3))
    run.serve([Request(0, 0.0, 10, 20), Request(1, 0.05, 10, 1, items)])
    busy = run.engine.busy_seconds()
    assert busy["lane"] == pytest.approx(3.0)
    assert busy["lane_alone"] == pytest.approx(run.lane_seconds - (2.0 - 0.1), abs=0.2)
    assert busy["encode"] == 0.0


@pytest.mark.parametrize("size", [30, 75, 130, 260])
def test_what_the_lane_takes_the_steps_beside_it_do_not_have(size: int) -> None:
    """Also where it gets its next item in the middle of a step."""
    run = Run(PlainCosts(base=1.0, embed=0.01, left=0.5), encode_ahead=True)
    items = tuple(Item("image", size, content) for content in range(5))
    run.serve([Request(0, 0.0, 10, 30), Request(1, 0.05, 10, 1, items)])
    lane = run.engine.busy_seconds()["lane"]
    assert lane == pytest.approx(5 * size / 100)
    # half of each of its seconds is missing to the steps, and each makes a token in a second of its own
    assert sum(seconds for _, seconds, _ in run.steps) == pytest.approx(len(run.steps) + lane / 2)

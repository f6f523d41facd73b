"""Stages that share the processors of a host."""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.kernel import Cores, Host, Simulator
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import build
from vllm_omni_sched.sim.workloads.trace import Exact, Header, write_trace

FRONT, ANSWER, PER_STEP, PER_OUTPUT, STEP = 2e-3, 1e-3, 4e-4, 1e-4, 5e-3
TOLD = ANSWER + PER_STEP + PER_OUTPUT  # from a step's end until one request's client knows


@pytest.fixture
def sim() -> Simulator:
    return Simulator()


@pytest.mark.parametrize(
    ("threads", "ends"),
    [
        ([(0.0, 1.0, [1.0])], [1.0]),  # alone
        ([(0.0, 1.0, [1.0]), (0.0, 1.0, [1.0])], [2.0, 2.0]),
        ([(0.0, 4.0, [1.0]), (0.0, 4.0, [1.0])], [5.0, 5.0]),  # seconds, not a factor
        # the second one is slowed for as long as the first is there, and then no more
        ([(0.0, 1.0, [0.0]), (0.0, 1.0, [1.0])], [1.0, 1.5]),
        # half of it was done before the other came
        ([(0.0, 1.0, [1.0]), (0.5, 1.0, [0.0])], [1.5, 1.5]),
        # more others than were measured slow it down as much as the last that was
        ([(0.0, 1.0, [2.0]), (0.0, 1.0, [2.0]), (0.0, 1.0, [2.0])], [3.0, 3.0, 3.0]),
        ([(0.0, 1.0, [1.0, 3.0]), (0.0, 1.0, [1.0, 3.0]), (0.0, 1.0, [1.0, 3.0])], [4.0, 4.0, 4.0]),
        ([(0.0, 1.0, []), (0.0, 1.0, [])], [1.0, 1.0]),  # nothing was measured
        ([(0.0, 0.0, [2.0]), (0.0, 1.0, [0.0])], [0.0, 1.0]),
    ],
)
def test_threads_slow_each_other_down_as_their_kinds_do(
    sim: Simulator, threads: list[tuple[float, float, list[float]]], ends: list[float]
) -> None:
    cores, found = Cores(sim, 3), {}

    def begin(which: int) -> None:
        _, seconds, beside = threads[which]
        cores.run(seconds, beside, lambda one: found.update({one: sim.now}), which)

    for number, (at, _, _) in enumerate(threads):
        sim.at(at, begin, number)
    sim.run()
    assert [found[number] for number in range(len(threads))] == pytest.approx(ends)
    assert not cores.running


def test_of_more_threads_than_cores_each_has_its_part(sim: Simulator) -> None:
    cores, found = Cores(sim, 2), []
    for beside in ([0.0, 0.0], [0.0, 0.0], [0.0, 0.5]):
        cores.run(1.0, beside, lambda _: found.append(sim.now), None)
    sim.run()
    # two of them have 2/3 of a core each, the third takes half a second more; when those are done it is alone
    assert found == pytest.approx([1.5, 1.5, 1.5 + (1 - 1.5 / 2)])


def test_the_front_end_does_one_thing_after_the_other(sim: Simulator) -> None:
    host, found = Host(sim, 2), []

    def tell(what: str) -> None:
        found.append((what, sim.now))
        if what == "first":
            host.front(1.0, tell, "asked for later")

    host.front(2.0, tell, "first")
    host.front(3.0, tell, "second")
    sim.run()
    assert found == [("first", 2.0), ("second", 5.0), ("asked for later", 6.0)]
    assert host.front_seconds == 6.0


def calibration(folder: Path, name: str, **step: Any) -> str:
    body = {
        "version": 1,
        "source": "a test",
        "step": {
            "base_seconds": STEP,
            "per_decode": 0.0,
            "per_context_token": 0.0,
            "per_prefill_token": 0.0,
            "per_prefill_pair": 0.0,
            **step,
        },
        "encode": {},
        "frontend": {"per_request": FRONT, "per_text_token": 0.0, "per_step": PER_STEP, "per_output": PER_OUTPUT},
        "answer_seconds": ANSWER,
        "kv_tokens": 100_000,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(body))
    return str(path)


def scenario(folder: Path, requests: list[Exact], beside: float = 0.0, **first: Any) -> dict[str, Any]:
    write_trace(folder / "trace.jsonl", Header(format="vllm-omni-sched trace", version=1), requests)
    return {
        "name": "two stages",
        "duration_seconds": 100.0,
        "workload": {"kind": "trace", "file": str(folder / "trace.jsonl")},
        "cluster": {"host_cores": 2},
        "stages": [
            {
                "name": "thinker",
                "kind": "engine",
                "output": True,
                "calibration": calibration(folder, "thinker", beside=[beside]),
                "link": {"latency_seconds": 0.5},
                **first,
            },
            {
                "name": "talker",
                "kind": "engine",
                "calibration": calibration(folder, "talker", base_seconds=1.0, beside=[0.0]),
                "prompt_tokens": 1,
                "tokens_each": 2.0,
            },
        ],
    }


def run(folder: Path, requests: list[Exact], **first: Any) -> Any:
    return simulate(build(scenario(folder, requests, **first), "a test", folder))


def test_a_lonely_request_takes_what_its_stages_take_one_after_the_other(tmp_path: Path) -> None:
    result = run(tmp_path, [Exact(at=1.0, text_tokens=20, output_tokens=3)])
    (record,) = result.records
    assert record.ttft == pytest.approx(FRONT + STEP + TOLD)
    thinks = FRONT + 3 * STEP + TOLD
    says = FRONT + 6 * 1.0 + TOLD  # two tokens for each, and its prompt is computed with the first
    assert record.end - record.arrival == pytest.approx(thinks + 0.5 + says)
    assert result.summary()["operations"] is None  # a calibration has times, and not what they go to
    # of the talker's tokens no client sees the gaps
    assert (result.gaps.count, result.gaps.quantile(1.0)) == (2.0, pytest.approx(STEP, rel=0.01))


def test_a_step_takes_longer_while_the_other_stage_is_at_work(tmp_path: Path) -> None:
    requests = [
        Exact(at=1.0, text_tokens=20, output_tokens=3),
        Exact(at=3.0, text_tokens=20, output_tokens=3),  # while the talker says what the first one thought
    ]
    alone, beside = run(tmp_path, requests, beside=3e-3).records
    assert alone.ttft == pytest.approx(FRONT + STEP + TOLD)
    assert beside.ttft == pytest.approx(FRONT + STEP + 3e-3 + TOLD)


def test_clients_of_one_step_wait_for_the_work_of_the_front_end_together(tmp_path: Path) -> None:
    """Both prompts are in the second step; the first step's outputs are one request's."""
    requests = [Exact(at=1.0, text_tokens=20, output_tokens=2) for _ in range(3)]
    first, second, third = run(tmp_path, requests).records
    assert first.ttft == pytest.approx(FRONT + STEP + TOLD)
    # the front end is at them while the first one is computed
    together = FRONT + 2 * STEP + ANSWER + PER_STEP + 3 * PER_OUTPUT
    assert second.ttft == third.ttft == pytest.approx(together)


def test_an_engine_that_was_measured_behind_a_server_has_a_front_end_of_its_own(tmp_path: Path) -> None:
    raw = scenario(tmp_path, [Exact(at=1.0, text_tokens=20, output_tokens=3) for _ in range(2)])
    del raw["cluster"], raw["stages"][1]
    first, second = simulate(build(raw, "a test", tmp_path)).records
    assert first.ttft == pytest.approx(FRONT + STEP + TOLD)
    assert second.ttft == pytest.approx(FRONT + 2 * STEP + TOLD + PER_OUTPUT)  # with the other's second token


@pytest.mark.parametrize("ahead", [False, True])
def test_steps_of_an_engine_that_encodes_ahead_take_what_was_measured_of_it(tmp_path: Path, ahead: bool) -> None:
    raw = scenario(tmp_path, [Exact(at=1.0, text_tokens=20, output_tokens=3)])
    del raw["cluster"], raw["stages"][1]
    raw["stages"][0]["calibration"] = calibration(tmp_path, "thinker", with_lane=-2e-3)
    raw["policy"] = {"encode_ahead": ahead}
    (record,) = simulate(build(raw, "a test", tmp_path)).records
    assert record.ttft == pytest.approx(FRONT + STEP - (2e-3 if ahead else 0.0) + TOLD)


def test_shared_processors_need_measured_engines(tmp_path: Path) -> None:
    raw = scenario(tmp_path, [Exact(at=1.0, text_tokens=20, output_tokens=3)])
    del raw["stages"][0]["calibration"]
    raw["stages"][0]["model"] = "qwen2.5-vl-7b"
    with pytest.raises(ConfigError, match=r"'cluster.host_cores' needs a calibration of each engine: 'stages.thinker'"):
        build(raw, "a test", tmp_path)

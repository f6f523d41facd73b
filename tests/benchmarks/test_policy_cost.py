"""`benchmarks.policy_cost`: each bench makes real decisions, and the same ones every time."""

from __future__ import annotations

import json
import random

import pytest

from benchmarks.policy_cost import BAR_MICROSECONDS
from benchmarks.policy_cost.__main__ import DECISIONS, main
from vllm_omni_sched.resource.pipeline.stage_gate import GatePlan


@pytest.mark.parametrize("name", sorted(DECISIONS))
def test_a_bench_can_be_used_again_and_again(name):
    decision = DECISIONS[name]
    bench = decision.make(min(decision.sizes[-1], 100), random.Random(0))
    assert len(bench.seconds(20, most_seconds=60)) == 20


def decided(name):
    bench, answers = DECISIONS[name].make(30, random.Random(1)), []
    for _ in range(40):
        asked = bench.before()
        answers.append(bench.decide(asked))
        bench.after(asked, answers[-1])
    return answers


def test_the_gate_and_one_that_looks_at_all_release_one_by_one():
    for name in ("StageGate.release, one place", "gate, one place, all looked at"):
        plans = decided(name)
        assert [len(plan.releases) for plan in plans] == [1] * len(plans)
        assert plans == decided(name)
    for name in ("StageGate.release, no room", "StageGate.release, no credits"):
        assert set(decided(name)) == {GatePlan()}


def test_the_result_names_each_decision_size_and_the_bar(tmp_path, capsys):
    names = ["WaitingQueue.pop", "gate, no room, all looked at"]
    main(["--decisions", *names, "--most", "100", "--samples", "5", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "policy_cost.json").read_text())
    assert [one["decision"] for one in result["results"]] == names
    assert [one["bar_microseconds"] for one in result["results"]] == [BAR_MICROSECONDS, None]
    for one in result["results"]:
        assert list(one["microseconds"]) == ["10", "100"]
        assert all(each["samples"] == 5 for each in one["microseconds"].values())
    assert {"revision", "cpu", "seed", "versions"} <= result["provenance"].keys()
    assert "WaitingQueue.pop" in capsys.readouterr().out

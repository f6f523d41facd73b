"""The best of a variant's choices, by runs that nobody simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.scenarios import GOOD
from tests.support.sim_results import record
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.measure import Histogram, Result
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.study.evaluate import Finding
from vllm_omni_sched.sim.study.plan import Study, load_study
from vllm_omni_sched.sim.study.running import TRAINING, run_study

CHOICES = """
[search]
kind = "max_rate"
[tune]
trials = 12
finalists = 2
trial = { requests = 50 }
final = { requests = 80 }
[[variants]]
name = "fixed"
[[variants]]
name = "tuned"
[variants.choices]
"stages.llm.max_num_seqs" = [256, 2, 4, 8]
layout = [
  { "stages.llm.devices" = 1, "stages.llm.replicas" = 8 },
  { "stages.llm.devices" = 2, "stages.llm.replicas" = 4 },
]
"""
SPEED = {256: 1.0, 2: 2.0, 4: 3.0, 8: 5.0}
seen: list[Scenario] = []


def simulate(scenario: Scenario, *_: Any) -> Result:
    """Serves a rate that depends on the two choices, and on nothing else."""
    seen.append(scenario)
    stage = scenario.stage("llm")
    served = SPEED[stage.max_num_seqs] * (2 if stage.devices == 2 else 1)  # type: ignore[union-attr]
    assert scenario.workload.rate is not None
    good = 100 if scenario.workload.rate <= served else 50
    records = [record(n, first=n + (0.5 if n < good else 9.0)) for n in range(100)]
    return Result(
        scenario.name,
        scenario.seed,
        scenario.slo,
        records,
        gaps=Histogram(),
        seconds=1.0,
        measured_seconds=1.0,
        events=1,
    )


def study(tmp_path: Path, more: str = CHOICES, before: str = "repeats = 2\n") -> Study:
    path = tmp_path / "one.toml"
    path.write_text(before + GOOD + more)
    return load_study(path, {"policy.encode_ahead": False})


def findings(tmp_path: Path, more: str = CHOICES, jobs: int = 1) -> list[Finding]:
    seen.clear()
    found = list(run_study(study(tmp_path, more), simulate, jobs))
    return sorted(found, key=lambda one: (one.variant, one.seed))


def test_the_best_combination_is_chosen_and_told(tmp_path: Path) -> None:
    fixed, _, first, second = findings(tmp_path)
    assert fixed.tuned is None
    assert first.error == ""
    assert first.tuned is not None
    assert first.tuned["chosen"] == {
        "stages.llm.max_num_seqs": 8,
        "layout": {"stages.llm.devices": 2, "stages.llm.replicas": 4},
    }
    assert (first.tuned["trials"], first.tuned["possible"], len(first.tuned["finalists"])) == (8, 8, 3)
    assert first.found is not None
    assert fixed.found is not None
    assert first.found["value"] == pytest.approx(10, rel=0.06)
    assert fixed.found["value"] == pytest.approx(1, rel=0.06)
    assert second.tuned == first.tuned  # all seeds of a point have the same flags


def test_seeds_that_are_reported_are_not_those_of_training(tmp_path: Path) -> None:
    findings(tmp_path)
    training = [one for one in seen if one.seed >= TRAINING]
    reported = [one for one in seen if one.seed < TRAINING]
    assert {one.requests for one in training} == {50, 80}
    assert {one.requests for one in reported} == {None}
    assert {one.seed for one in reported} == {3, 4}
    assert {one.seed for one in training if one.requests == 50} == {TRAINING}
    assert {one.seed for one in training if one.requests == 80} == {TRAINING, TRAINING + 1}


def test_each_variant_has_as_many_trials_whatever_it_may_choose(tmp_path: Path) -> None:
    more = CHOICES.replace("trials = 12", "trials = 5") + '"stages.llm.max_num_batched_tokens" = [8192, 512, 1024]\n'
    more = more.replace(
        '[[variants]]\nname = "fixed"\n',
        '[[variants]]\nname = "few"\n[variants.choices]\n'
        '"stages.llm.max_num_seqs" = [256, 2, 4, 8]\n"stages.llm.max_num_batched_tokens" = [8192, 512]\n',
    )
    found = {one.variant: one.tuned for one in findings(tmp_path, more)}
    assert {name: (tuned or {})["trials"] for name, tuned in found.items()} == {"few": 5, "tuned": 5}
    assert {name: (tuned or {})["possible"] for name, tuned in found.items()} == {"few": 8, "tuned": 24}


def test_jobs_change_nothing(tmp_path: Path) -> None:
    one, two = findings(tmp_path), findings(tmp_path, jobs=2)
    assert [(a.label, a.seed, a.tuned, a.found) for a in one] == [(b.label, b.seed, b.tuned, b.found) for b in two]


def test_a_combination_that_cannot_be_is_a_trial_and_is_not_chosen(tmp_path: Path) -> None:
    # each value can be with the first one of the other choice; both together need 16 devices, and there are 8
    more = CHOICES.split("layout = ")[0] + '"stages.llm.devices" = [1, 2]\n"stages.llm.replicas" = [4, 8]\n'
    more = more.replace("[256, 2, 4, 8]", "[256, 8]")
    (chosen, _) = [one.tuned for one in findings(tmp_path, more) if one.tuned is not None]
    assert chosen is not None
    assert (chosen["trials"], chosen["possible"]) == (8, 8)
    assert (chosen["chosen"]["stages.llm.devices"], chosen["chosen"]["stages.llm.replicas"]) == (2, 4)


def test_a_key_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_num_sequences"):
        study(tmp_path, CHOICES.replace('"stages.llm.replicas" = 4', '"stages.llm.max_num_sequences" = 4'))


def test_a_choice_without_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"choices\.stages\.llm\.max_num_seqs' has no values"):
        study(tmp_path, CHOICES.replace("[256, 2, 4, 8]", "[]"))


def test_a_training_seed_cannot_be_reported(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(GOOD + CHOICES)
    (_, one) = run_study(load_study(path, {"seed": TRAINING, "policy.encode_ahead": False}), simulate)
    assert "are for training" in one.error


CASES = """
[[variants]]
name = "stock"
set = { "policy.encode_ahead" = false }
[[variants]]
name = "ours"
choices = { "stages.llm.max_num_seqs" = [256, 8] }
[[cases]]
name = "slow"
set = { "workload.rate" = 1.0 }
[[cases]]
name = "quick"
set = { "workload.rate" = 4.0 }
[cases.variants.ours]
set = { "policy.itl_target_ms" = 20.0 }
choices.layout = [{ "stages.llm.devices" = 1 }]
"""


def test_each_variant_runs_in_each_case(tmp_path: Path) -> None:
    found = study(tmp_path, CASES, before="")
    assert found.systems == ("stock", "ours")
    assert [point.variant for point in found.points] == ["slow: stock", "slow: ours", "quick: stock", "quick: ours"]
    rates = [point.first_choice.scenario().workload.rate for point in found.points]
    assert rates == [1.0, 1.0, 4.0, 4.0]
    assert [list(point.choices) for point in found.points[1::2]] == [
        ["stages.llm.max_num_seqs"],
        ["layout", "stages.llm.max_num_seqs"],
    ]
    assert found.points[3].first_choice.scenario().policy.itl_target_ms == 20.0


def test_a_case_of_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such variant"):
        study(tmp_path, CASES.replace("cases.variants.ours", "cases.variants.other"), before="")

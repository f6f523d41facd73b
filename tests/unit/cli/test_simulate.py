"""`vllm-omni-sched simulate`: what it shows and writes, and with which status it ends. Nothing is simulated here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support import sim_results
from tests.support.scenarios import GOOD
from vllm_omni_sched.cli import app, simulate
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.scenario.scenario import Scenario

pytestmark = pytest.mark.once  # nothing here reaches vLLM

SWEEP = '[sweep]\n"workload.rate" = [1, 2]\n'


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Scenario]:
    """The scenarios that were run, in place of simulations."""
    scenarios: list[Scenario] = []

    def run(scenario: Scenario, progress: Any = None, spans: Any = None) -> Any:
        scenarios.append(scenario)
        return sim_results.run(scenario, progress, spans)

    monkeypatch.setattr(simulate, "runner", lambda: run)
    return scenarios


def file(folder: Path, more: str = "", before: str = "") -> Path:
    path = folder / "one.toml"
    path.write_text(before + GOOD + more)
    return path


def call(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["simulate", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_one_run_is_told_in_full(asked: list[Scenario], tmp_path: Path) -> None:
    status, said, progress = call(file(tmp_path))
    assert (status, progress) == (0, "")
    assert "pictures on one node  simulated" in said
    for part in ("TTFT", "ITL", "TPOT", "latency", "goodput", "llm busy", "80%", "device hours", "image", "text"):
        assert part in said
    assert len(asked) == 1


def test_values_take_the_place_of_those_in_the_file(asked: list[Scenario], tmp_path: Path) -> None:
    status, said, _ = call(
        file(tmp_path), "--set", "stages.llm.replicas=4", "--set", "policy.waiting_order=sla", "--seed", 9, "--json"
    )
    found = json.loads(said)
    assert status == 0
    assert asked[0].stage("llm").replicas == 4
    assert asked[0].policy.waiting_order.value == "sla"
    assert (asked[0].seed, found["provenance"]["seed"]) == (9, 9)
    assert found["simulated"] is True
    assert found["scenario"]["name"] == "pictures on one node"
    assert found["results"][0]["summary"]["requests"] == 400
    assert found["provenance"]["costs"] == {"llm": "assumed: for a test"}


def test_a_study_has_a_row_for_each_point(asked: list[Scenario], tmp_path: Path) -> None:
    status, said, _ = call(file(tmp_path, SWEEP, "repeats = 2\n"), "--jobs", 1)
    rows = [line.split() for line in said.splitlines() if "%" in line and "interval" not in line]
    assert status == 0
    assert [(row[0], row[-1]) for row in rows] == [("1", "2"), ("2", "2")]  # the rate, and how many seeds
    assert all(row.count("±") == 4 for row in rows)
    assert len(asked) == 4


def test_all_files_are_written(asked: list[Scenario], tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, _, _ = call(file(tmp_path), "--out", out, "--trace", out / "trace.json")
    assert status == 0
    stem = "pictures-on-one-node"
    assert sorted(path.name for path in out.iterdir()) == [f"{stem}.json", "trace.json"]
    assert json.loads((out / f"{stem}.json").read_text())["simulated"] is True
    assert {event["ph"] for event in json.loads((out / "trace.json").read_text())["traceEvents"]} == {
        "M",
        "X",
        "b",
        "e",
    }


def test_a_point_that_fails_is_named_and_the_rest_is_there(
    asked: list[Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(scenario: Scenario, *_: Any) -> Any:
        if scenario.workload.rate == 1:
            raise ConfigError("stages.llm: the model does not fit")
        return sim_results.run(scenario)

    monkeypatch.setattr(simulate, "runner", lambda: run)
    status, said, wrong = call(file(tmp_path, SWEEP), "--out", tmp_path / "out")
    assert status == 1
    assert wrong == "vllm-omni-sched simulate: workload.rate 1: stages.llm: the model does not fit"
    assert "failed" in said
    found = json.loads((tmp_path / "out" / "pictures-on-one-node.json").read_text())
    assert found["results"][0]["error"] == "stages.llm: the model does not fit"
    assert found["results"][1]["summary"]["requests"] == 200


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "stages.lm.replicas=4"], "there is no 'stages.lm'; did you mean 'stages.llm'?"),
        (["--set", "replicas"], "--set replicas: write it as KEY=VALUE"),
        (["--set", "seed=many"], "option 'seed': input should be a valid integer, got 'many'"),
        (["--trace", "t.json", "--trace-seconds", "0"], "--trace-seconds must be positive, got 0"),
        (["--trace", "t.json", "--set", "search.kind=throughput"], "asks for a search (throughput)"),
        (["--trace", "t.json", "--set", "repeats=3"], "--trace is of one run, and one.toml asks for 3 points"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_runs(
    asked: list[Scenario], tmp_path: Path, arguments: list[str], said: str
) -> None:
    status, shown, wrong = call(file(tmp_path), *arguments)
    assert (status, shown) == (2, "")
    assert said in wrong
    assert asked == []


def test_a_folder_that_cannot_be_written(asked: list[Scenario], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    status, _, wrong = call(file(tmp_path), "--out", tmp_path / "out")
    assert status == 2
    assert "out: File exists" in wrong


def test_an_interrupt_leaves_nothing(asked: list[Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "runner", lambda: run)
    status, said, wrong = call(file(tmp_path), "--out", tmp_path / "out")
    assert (status, said) == (130, "")
    assert wrong == "vllm-omni-sched simulate: interrupted; no file is half-written"
    assert not (tmp_path / "out").exists()


def test_points_that_were_done_before_an_interrupt_are_kept(
    asked: list[Scenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    had: list[float | None] = []

    def run(scenario: Scenario, *rest: Any) -> Any:
        had.append(scenario.workload.rate)
        if len(had) == 3:
            raise KeyboardInterrupt
        return sim_results.run(scenario, *rest)

    monkeypatch.setattr(simulate, "runner", lambda: run)
    study = file(tmp_path, '[sweep]\n"workload.rate" = [1.0, 2.0, 4.0, 8.0]\n')
    status, said, wrong = call(study, "--out", tmp_path / "out")
    assert status == 130
    assert "interrupted after 2 of 4 points; they are in" in wrong
    (written,) = (tmp_path / "out").iterdir()
    body = json.loads(written.read_text())
    assert body["interrupted"] == {"points": 2, "of": 4}
    assert [one["values"]["workload.rate"] for one in body["results"]] == [1.0, 2.0] == had[:2]
    assert said

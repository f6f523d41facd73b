"""`vllm-omni-sched tune`: what it writes, what it says, and with which status it ends."""

import json
import random

import pytest
import yaml
from typer.testing import CliRunner

from vllm_omni_sched.cli import app
from vllm_omni_sched.config import OmniSchedConfig, read_options
from vllm_omni_sched.sim.tune import replay
from vllm_omni_sched.sim.tune.search import Measured
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, write_trace

SCENARIO = """
name = "short"
duration_seconds = 5.0
[workload]
kind = "text"
rate = 2.0
[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
"""


@pytest.fixture
def trace(tmp_path):
    rng = random.Random(1)
    entries = [Exact(0.25 * at, rng.randrange(50, 500), rng.randrange(2, 20)) for at in range(80)]
    write_trace(tmp_path / "trace.jsonl", Header(FORMAT, VERSION, 1.0, "a test"), entries)
    return tmp_path / "trace.jsonl"


def run(*arguments):
    result = CliRunner().invoke(app, ["tune", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


QUICK = ("--trials", 3, "--seeds", 1, "--held-out", 3, "--quiet")


def stub(monkeypatch, evaluate):
    monkeypatch.setattr(replay, "on_trace", lambda *_: evaluate)


def test_a_quiet_server_is_told_that_nothing_helps(trace, tmp_path):
    status, said = run(trace, *QUICK, "--out", tmp_path / "options.yaml", "--result", tmp_path / "result.json")
    assert status == 0
    assert "No option is known to help: 100.0% of the requests are within the SLO" in said
    assert yaml.safe_load((tmp_path / "options.yaml").read_text()) == {}
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["simulated"] is True
    assert record["provenance"]["seed"] == 1
    assert len(record["held_out"]["default"]) == 3


def test_options_that_help_are_written_as_they_are_read(trace, tmp_path, monkeypatch):
    stub(monkeypatch, lambda options, seed: Measured(0.8 if options.get("pieces") else 0.3, 1.0))
    out = tmp_path / "options.yaml"
    status, said = run(trace, "--trials", 12, "--seeds", 1, "--held-out", 4, "--quiet", "--itl", 0.05, "--out", out)
    assert status == 0
    assert "80.0% of the requests within the SLO, instead of 30.0%: +50.0 points" in said
    options = yaml.safe_load(out.read_text())
    assert options == {"interactive_ttft_ms": 2000.0, "interactive_itl_ms": 50.0, "pieces": True}
    read_options(OmniSchedConfig, options)


def test_an_interrupted_search_says_so_and_keeps_the_best(trace, tmp_path, monkeypatch):
    runs = []

    def evaluate(options, seed):
        runs.append(options)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return Measured(0.5, 1.0)

    stub(monkeypatch, evaluate)
    status, said = run(trace, *QUICK, "--trials", 9, "--result", tmp_path / "result.json")
    assert status == 0
    assert "Interrupted after 3 trials" in said
    assert json.loads((tmp_path / "result.json").read_text())["interrupted"] is True


def test_interrupted_while_comparing_it_says_that_the_gain_is_not_known(trace, tmp_path, monkeypatch):
    def evaluate(options, seed):
        if seed >= replay.HELD_OUT:
            raise KeyboardInterrupt
        return Measured(0.8 if options.get("pieces") else 0.3, 1.0)

    stub(monkeypatch, evaluate)
    status, said = run(trace, *QUICK, "--trials", 12, "--out", tmp_path / "options.yaml")
    assert status == 0
    assert "the gain is not known" in said
    assert yaml.safe_load((tmp_path / "options.yaml").read_text())["pieces"] is True


def test_interrupted_at_once_there_is_nothing_to_keep(trace, monkeypatch):
    def evaluate(options, seed):
        raise KeyboardInterrupt

    stub(monkeypatch, evaluate)
    status, said = run(trace, *QUICK)
    assert (status, said) == (2, "vllm-omni-sched tune: interrupted before anything was tried")


def test_a_scenario_is_tuned_with_its_own_promises(tmp_path):
    (tmp_path / "short.toml").write_text(SCENARIO)
    status, said = run(tmp_path / "short.toml", *QUICK, "--itl", 0.2)
    assert status == 0
    assert "short, TTFT 2 s, between tokens 0.2 s" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.jsonl",), "missing.jsonl"),
        (("missing.toml",), "missing.toml"),
        (("trace.jsonl", "--model", "qwen2.5-vl-8b"), "did you mean 'qwen2.5-vl-7b'?"),
        (("trace.jsonl", "--device", "a100"), "unknown device 'a100'"),
        (("trace.jsonl", "--ttft", "0"), "--ttft must be positive, got 0"),
        (("trace.jsonl", "--itl", "-1"), "--itl must be positive, got -1"),
        (("trace.jsonl", "--scale", "nan"), "--scale must be positive, got nan"),
    ],
)
def test_a_call_that_makes_no_sense(arguments, said, trace):
    status, told = run(trace.parent / arguments[0], *arguments[1:], *QUICK)
    assert status == 2
    assert said in told
    assert told.startswith("vllm-omni-sched tune: ")


def test_a_scenario_without_an_engine_has_nothing_to_tune(tmp_path):
    text = SCENARIO[: SCENARIO.index('kind = "engine"')] + 'kind = "servers"\nseconds = 1.0\n'
    (tmp_path / "short.toml").write_text(text)
    status, said = run(tmp_path / "short.toml", *QUICK)
    assert status == 2
    assert "no stage of kind 'engine'" in said

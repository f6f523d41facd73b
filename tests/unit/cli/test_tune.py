"""`vllm-omni-sched tune`: what it writes, what it says, and with which status it ends."""

import json
import random

import pytest
import yaml
from typer.testing import CliRunner

from vllm_omni_sched.cli import app
from vllm_omni_sched.config.load import load_config, read_options
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import load
from vllm_omni_sched.sim.study import tune as evaluations
from vllm_omni_sched.sim.study.search import Measured
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, write_trace

pytestmark = pytest.mark.once  # nothing here reaches vLLM

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
    monkeypatch.setattr(evaluations, "on_scenario", lambda *_: evaluate)


def test_a_quiet_server_is_told_that_nothing_helps(trace, tmp_path):
    status, said = run(trace, *QUICK, "--out", tmp_path / "options.yaml", "--result", tmp_path / "result.json")
    assert status == 0
    assert "No option is known to help beyond vLLM's own flags: 100.0% of the requests are within the SLO" in said
    assert yaml.safe_load((tmp_path / "options.yaml").read_text()) == {}
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["simulated"] is True
    assert record["provenance"]["seed"] == 1
    assert len(record["held_out"]["baselines"]["the server's defaults"]["runs"]) == 3


def test_options_that_help_are_written_as_they_are_read(trace, tmp_path, monkeypatch):
    stub(monkeypatch, lambda options, seed: Measured(0.8 if options.get("pieces") else 0.3, 1.0))
    out = tmp_path / "options.yaml"
    status, said = run(trace, "--trials", 12, "--seeds", 1, "--held-out", 4, "--quiet", "--itl", 0.05, "--out", out)
    assert status == 0
    assert "80.0% of the requests within the SLO, instead of 30.0% with the server's defaults: +50.0 points" in said
    options = yaml.safe_load(out.read_text())
    assert options == {"interactive_ttft_ms": 2000.0, "interactive_itl_ms": 50.0, "expert": {"pieces": True}}
    read_options(OmniSchedConfig, options)


def test_what_a_flag_of_vllm_gives_is_not_credited_to_options(trace, tmp_path, monkeypatch):
    """Short steps are what helps here, by vLLM's flag as well as by ours."""

    def measured(options, seed):
        short = options.get("--max-num-batched-tokens", 8192) <= 512 or options.get("prefill_control", "off") != "off"
        return Measured(1.0 if short else 0.4, 1.0)

    stub(monkeypatch, measured)
    out, result = tmp_path / "options.yaml", tmp_path / "result.json"
    status, said = run(trace, *QUICK, "--trials", 20, "--out", out, "--result", result)
    assert status == 0
    assert "No option is known to help beyond vLLM with --max-num-batched-tokens 256" in said
    assert yaml.safe_load(out.read_text()) == {}
    assert "# with vLLM's own --max-num-batched-tokens 256" in out.read_text()
    record = json.loads(result.read_text())
    assert (record["flags"], record["options"]) == ({"--max-num-batched-tokens": 256}, {})


def test_an_interrupted_search_says_so_and_keeps_the_best(trace, tmp_path, monkeypatch):
    runs = []

    def evaluate(options, seed):
        if any(not name.startswith(("--", "interactive")) for name in options):
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
        if seed >= evaluations.HELD_OUT:
            raise KeyboardInterrupt
        return Measured(0.8 if options.get("pieces") else 0.3, 1.0)

    stub(monkeypatch, evaluate)
    status, said = run(trace, *QUICK, "--trials", 12, "--out", tmp_path / "options.yaml")
    assert status == 0
    assert "the gain is not known" in said
    assert yaml.safe_load((tmp_path / "options.yaml").read_text())["expert"] == {"pieces": True}


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


POLICY = """
name = "with a policy"
duration_seconds = 6.0
[slo]
itl_seconds = 0.05
[workload]
kind = "servegen-mm-image"
rate = 4.0
[policy]
encode_ahead = true
prefill_control = "adaptive"
control_target_ms = 40.0
interactive_ttft_ms = 1500.0
{more}
[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
devices = {devices}
"""


def tuned(tmp_path, *arguments, more=""):
    """The scenario, what was written for it, and the record."""
    (tmp_path / "own.toml").write_text(POLICY.format(devices=1, more=more))
    out, result = tmp_path / "options.yaml", tmp_path / "result.json"
    status, said = run(tmp_path / "own.toml", *arguments, "--quiet", "--out", out, "--result", result)
    assert status == 0, said
    return load(tmp_path / "own.toml"), yaml.safe_load(out.read_text()), json.loads(result.read_text()), said


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_is_written_serves_as_it_was_measured(tmp_path, seed):
    few = ("--trials", 4, "--seeds", 1, "--held-out", 3, "--seed", seed)
    scenario, options, record, _ = tuned(tmp_path, *few)
    held_out = record["held_out"]
    flat = {**record["flags"], **options, **options.get("expert", {})}  # the record has no groups
    flat.pop("expert", None)
    (measured,) = [
        one["runs"] for one in [*held_out["baselines"].values(), *held_out["compared"]] if one["options"] == flat
    ]
    # a server with these flags that reads the file has its options, and no others
    serves = evaluations.with_options(scenario, record["flags"])
    policy = load_config({"omni_sched": options})
    for one, run_of in zip(held_out["seeds"], measured, strict=True):
        result = simulate(serves.model_copy(update={"policy": policy, "seed": one}))
        assert result.attainment == run_of["attainment"]
        assert result.summary()["ttft_seconds"]["p99"] == run_of["ttft_p99"]


def test_what_is_tried_is_the_policy_of_the_scenario_with_changes(tmp_path):
    _, options, record, said = tuned(tmp_path, "--trials", 1, "--seeds", 1, "--held-out", 2)
    own = {"encode_ahead": True, "prefill_control": "adaptive", "control_target_ms": 40.0}
    own |= {"interactive_ttft_ms": 1500.0}
    baselines = record["held_out"]["baselines"]
    assert baselines["the scenario's policy"]["options"] == own
    assert baselines["the server's defaults"]["options"] == {}
    assert baselines["the server's defaults"]["over"].keys() == {"the scenario's policy"}
    assert "with the server's defaults" in said
    if "No option is known to help" in said:
        assert options == own
    for one in record["held_out"]["compared"]:
        assert one["over"].keys() == baselines.keys()
        assert own.keys() <= one["options"].keys()
        assert one["options"]["interactive_ttft_ms"] == 1500.0  # the scenario's, not that of its SLO


def test_only_what_a_server_accepts_is_tried(tmp_path):
    text = POLICY.replace("encode_ahead = true\n", "")
    (tmp_path / "two.toml").write_text(text.format(devices=2, more=""))
    result = tmp_path / "result.json"
    status, _ = run(tmp_path / "two.toml", *QUICK, "--trials", 8, "--result", result)
    assert status == 0
    tried = [one["options"] for one in json.loads(result.read_text())["tried"]]
    assert tried
    assert not any("encode_ahead" in options for options in tried)
    _, _, record, _ = tuned(tmp_path, *QUICK, "--trials", 8, more="encoder_cache_host_bytes = 1000000")
    for one in record["tried"]:
        load_config({"omni_sched": one["options"]})


def test_a_trace_on_several_devices_is_tried_without_encode_ahead(trace, tmp_path):
    result = tmp_path / "result.json"
    status, _ = run(trace, *QUICK, "--trials", 6, "--devices", 2, "--result", result)
    assert status == 0
    assert not any("encode_ahead" in one["options"] for one in json.loads(result.read_text())["tried"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.jsonl",), "missing.jsonl"),
        (("missing.toml",), "missing.toml"),
        (("trace.jsonl", "--model", "qwen2.5-vl-8b"), "did you mean 'qwen2.5-vl-7b'?"),
        (("trace.jsonl", "--device", "a100"), "there is no device 'a100'; did you mean"),
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

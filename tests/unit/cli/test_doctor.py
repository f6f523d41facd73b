"""`vllm-omni-sched doctor`: what it finds, what it says, and with which status it ends."""

import json
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from dev.child_process import ChildProcess
from tests.engine.harness.processes import ENVIRONMENT
from tests.support.warm import WarmPopen
from vllm_omni_sched import compat
from vllm_omni_sched.cli import app, diagnosis
from vllm_omni_sched.compat import SUPPORTED_VERSIONS, Probe, features, modules, versions
from vllm_omni_sched.config.load import written
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine import checks  # before entry points are replaced, which torch reads

SYMBOL = "vllm.v1.core.sched.scheduler.Scheduler.schedule"


@pytest.fixture
def healthy(monkeypatch):
    """An environment where everything is in place; tests spoil one thing."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setattr(diagnosis, "_import_problem", lambda: None)
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.30.0")
    monkeypatch.setattr(checks, "decoder_kinds", lambda options: ())
    monkeypatch.setattr(compat, "device_type", lambda: "cpu")
    monkeypatch.setattr(compat, "why_no_preprocessing", lambda: None)
    monkeypatch.setattr(modules, "find", lambda module, path: None)
    monkeypatch.setattr(features, "probe_all", lambda **_: [Probe("a step", SYMBOL, "windows", True, "found")])
    point = metadata.EntryPoint(diagnosis.PLUGIN_NAME, "vllm_omni_sched.plugin:register", diagnosis.PLUGIN_GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [point])
    return monkeypatch


def run(*arguments):
    result = CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False)
    return result.exit_code, " ".join(result.stdout.split())


def test_a_healthy_installation_is_told_how_to_serve(healthy):
    status, said = run()
    assert status == 0
    assert "vllm 0.30.0 supported" in said
    assert "✓ windows" in said
    assert "✓ Scheduler.schedule a step" in said
    assert "vllm serve MODEL --scheduler-cls vllm_omni_sched.OmniScheduler" in said


def test_json_holds_all_findings_and_nothing_else(healthy):
    status, said = run("--json")
    findings = json.loads(said)
    assert status == 0
    assert findings["ok"] is True
    assert findings["problems"] == []
    assert [probe["symbol"] for probe in findings["probes"]] == [SYMBOL]
    assert {version["name"] for version in findings["versions"]} >= {"vllm", "torch", "python"}
    assert {feature["feature"] for feature in findings["features"]} >= {"windows", "session_delta"}


def missing(healthy):
    healthy.setattr(features, "probe_all", lambda **_: [Probe("a step", SYMBOL, "windows", False, "missing")])


def test_a_missing_extension_point_is_named_in_full_and_costs_its_feature_only(healthy):
    missing(healthy)
    status, said = run()
    assert status == 0
    assert f"– windows this vLLM has no {SYMBOL}" in said
    assert f"✗ {SYMBOL}" in said


OPTION_ON = '{"omni_sched": {"windows": "on"}}'
LENDING = '{"omni_sched": {"kv_lending": 0.2}}'
WRONG_VIDEO_OPTION = '{"omni_sched": {"video": {"decoders": 0}}}'
UNKNOWN_OPTION = '{"omni_sched": {"windoze": "on"}}'


@pytest.mark.parametrize(
    ("spoil", "arguments", "says"),
    [
        (missing, ["--additional-config", OPTION_ON], "option 'windows' is 'on' but cannot work"),
        (lambda _: None, ["--additional-config", UNKNOWN_OPTION], "did you mean 'expert.windows'?"),
        (lambda _: None, ["--additional-config", LENDING], "only the lane of encode-ahead borrows blocks"),
        (lambda _: None, ["--additional-config", WRONG_VIDEO_OPTION], "option 'video.decoders'"),
        (lambda _: None, ["--additional-config", "[]"], "must be a mapping"),
        (lambda h: h.setattr(versions, "vllm_version", lambda: "0.29.0"), [], "found 0.29.0"),
        (lambda h: h.setattr(metadata, "entry_points", lambda **_: []), [], "is not in 'vllm.general_plugins'"),
        (lambda h: h.setenv("VLLM_PLUGINS", "other,more"), [], "VLLM_PLUGINS=other,more leaves 'omni_sched' out"),
        (lambda h: h.setattr(diagnosis, "_import_problem", lambda: "vLLM is broken"), [], "vLLM is broken"),
    ],
    ids=[
        "on-impossible",
        "unknown-option",
        "kv-lending",
        "video-option",
        "no-mapping",
        "version",
        "not-registered",
        "not-allowed",
        "broken",
    ],
)
def test_what_would_stop_the_engine_is_said_with_status_1(healthy, spoil, arguments, says):
    spoil(healthy)
    status, said = run(*arguments)
    assert status == 1
    assert "Cannot serve" in said
    assert says in said
    assert run("--json", *arguments)[0] == 1


class Blocked:
    """A finder in front of all others that lets a module not be imported."""

    def __init__(self, module: str, error: Exception) -> None:
        self.module, self.error = module, error

    def find_spec(self, name, path=None, target=None):
        if name == self.module:
            raise self.error


def without(healthy, module, error):
    healthy.delitem(sys.modules, module, raising=False)
    healthy.setattr(sys, "meta_path", [Blocked(module, error), *sys.meta_path])


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ModuleNotFoundError("No module named 'av'", name="av"), "– PyAV not installed: pip install av pillow"),
        (ImportError("libavcodec.so.62: cannot open"), "– PyAV installed but cannot be imported: ImportError: libavc"),
        (ModuleNotFoundError("No module named 'x'", name="x"), "– PyAV installed but cannot be imported: No module"),
    ],
)
def test_without_pyav_nothing_that_needs_it_is_ticked(healthy, error, says):
    without(healthy, "av", error)
    status, said = run("--additional-config", '{"omni_sched": {"video": {"decoders": 3, "nvdec": "off"}}}')
    assert status == 0  # the scheduler works without
    assert says in said
    assert "– decoders, pyav they need PyAV" in said


def test_a_wrong_option_of_the_preprocessing_pool_is_a_problem(healthy):
    status, said = run("--additional-config", '{"omni_sched": {"preprocess": {"processes": -1}}}')
    assert status == 1
    assert "preprocess.processes" in said


def test_options_are_shown_with_where_they_come_from(healthy):
    given = {"waiting_order": "sla", "video": {"decoders": 3, "nvdec": "off"}}
    status, said = run("--additional-config", json.dumps({"omni_sched": given}))
    assert status == 0
    assert "waiting_order sla given" in said
    assert "video.decoders 3 given" in said
    assert "max_wait_seconds 30.0 default" in said
    assert 'client_classes ["interactive", "batch"] default' in said
    assert "Options" not in run()[1]  # nobody asked
    findings = json.loads(run("--json", "--additional-config", json.dumps({"omni_sched": given}))[1])
    shown = {option["name"]: (option["value"], option["given"]) for option in findings["options"]}
    assert {written(OmniSchedConfig, name) for name in OmniSchedConfig.model_fields} - {"video"} <= set(shown)
    assert (shown["waiting_order"], shown["expert.pieces"]) == (("sla", True), (False, False))


def test_options_that_a_profile_sets_are_shown_as_such(healthy):
    status, said = run("--additional-config", '{"omni_sched": "chat"}')
    assert status == 0
    assert "encode_ahead true profile" in said
    assert "profile chat given" in said


def test_additional_config_that_is_not_json_is_a_usage_error(healthy):
    result = CliRunner().invoke(app, ["doctor", "--additional-config", "{"])
    assert result.exit_code == 2
    assert "not JSON" in result.stderr


@pytest.mark.parametrize("name", ["chat", "x.yaml", "~/omni/x.yaml"])
def test_a_name_alone_as_additional_config_is_answered_with_how_to_write_it(healthy, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "200")
    result = CliRunner().invoke(app, ["doctor", "--additional-config", name])
    assert result.exit_code == 2
    assert f"""write it as '{{"omni_sched": "{name}"}}'""" in result.stderr


def test_without_vllm_it_says_so(monkeypatch):
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: None)
    status, said = run()
    assert status == 1
    assert "vllm not installed" in said
    assert "vLLM is not installed in this environment" in said
    assert SUPPORTED_VERSIONS[-1] in said


def test_a_vllm_that_cannot_be_imported_is_reported(monkeypatch):
    def broken(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(diagnosis, "import_module", broken)
    status, said = run()
    assert status == 1
    assert "cannot be imported: RuntimeError: operator torchvision::nms does not exist" in said


@pytest.mark.slow
def test_the_vllm_of_this_environment_passes(tmp_path):
    command = [sys.executable, "-m", "vllm_omni_sched", "doctor", "--json"]
    with ChildProcess(command, log=tmp_path / "log", env=ENVIRONMENT, start=WarmPopen) as process:
        status = process.wait()
    lines = process.log.read_text().splitlines()
    findings = json.loads("\n".join(lines[lines.index("{") :]))
    assert (status, findings["problems"]) == (0, [])
    active = {feature["feature"] for feature in findings["features"] if feature["active"]}
    assert active >= {"windows", "encoder_cache", "strip_frontier", "session_delta"}
    assert [probe["symbol"] for probe in findings["probes"] if probe["reason"] == "missing"] == []

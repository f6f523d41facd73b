"""Check what `make test` prints about skipped and about slow tests."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import dev.test
from dev.test import Outcome, kind_of_skip, reaches_vllm, slowest, unexpected_skips

REPORT = """<testsuites><testsuite tests="4" failures="0" errors="0" skipped="3">
<testcase classname="tests.x" name="a" time="2.5"/>
<testcase classname="tests.x" name="b" time="0.1">
<skipped type="pytest.skip" message="this machine has no CUDA device"/></testcase>
<testcase name="c"><skipped type="pytest.skip" message="libibverbs.so.1 is missing"/></testcase>
<testcase name="d"><skipped type="pytest.skip" message="libibverbs.so.1 is missing"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def outcome(tmp_path: Path) -> Outcome:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    return dev.test._read(report, ".venv", 0)


def test_the_last_line_counts_skips_by_reason(outcome: Outcome) -> None:
    assert str(outcome) == "1 passed, 3 skipped (2 unexpected, 1 no CUDA device) in .venv"


def test_the_slowest_tests_are_listed(outcome: Outcome) -> None:
    assert slowest([outcome], 2) == ["   2.5 s  tests.x::a (.venv)", "   0.1 s  tests.x::b (.venv)"]


def test_a_part_that_should_have_run_is_named(outcome: Outcome) -> None:
    assert unexpected_skips([outcome]) == ["2 in .venv: libibverbs.so.1 is missing"]


@pytest.mark.parametrize(
    ("allowed", "exit_code"), [("", 1), ("allowed", 0)], ids=["by default", "where a machine cannot run everything"]
)
def test_unexpected_skips_fail_the_suite(
    outcome: Outcome, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], allowed: str, exit_code: int
) -> None:
    monkeypatch.setenv("VENVS", ".venv")
    monkeypatch.setenv("SKIPS", allowed)
    monkeypatch.delenv("PYTEST", raising=False)
    monkeypatch.setattr(dev.test, "_write_models", lambda: None)
    monkeypatch.setattr(dev.test, "_run", lambda suite, selections: [outcome])
    monkeypatch.setattr(dev.test.system_packages, "missing", lambda environment: [])
    assert dev.test.main("test") == exit_code
    said = capsys.readouterr().out
    assert "2 in .venv: libibverbs.so.1 is missing" in said
    assert said.splitlines()[-1].startswith("make test: " + ("OK" if allowed else "FAILED"))


@pytest.mark.parametrize(("command", "verdict", "exit_code"), [("true", "passed", 0), ("false", "failed", 1)])
def test_what_runs_beside_the_tests_must_succeed_as_well(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
    verdict: str,
    exit_code: int,
) -> None:
    suite = replace(dev.test.SUITES["check"], beside=(command,))
    monkeypatch.setitem(dev.test.SUITES, "check", suite)
    monkeypatch.setattr(dev.test, "LOGS", tmp_path)
    monkeypatch.setenv("VENVS", ".venv")
    monkeypatch.delenv("PYTEST", raising=False)
    monkeypatch.setattr(dev.test, "_write_models", lambda: None)
    monkeypatch.setattr(dev.test, "_run", lambda suite, selections: [Outcome(venv, 0, passed=1) for venv in selections])
    monkeypatch.setattr(dev.test.system_packages, "missing", lambda environment: [])
    assert dev.test.main("check") == exit_code
    assert f"`{command}` {verdict}" in capsys.readouterr().out.splitlines()[-1]


PYTEST = """#!{python}
import os
import sys
from pathlib import Path

here = Path(sys.argv[0]).parents[1]
options = dict(word.split("=", 1) for word in sys.argv if word.startswith("--") and "=" in word)
turns = [int(pipe) for pipe in options["--turns"].split(",")]
if here.name == ".venv-b":
    (here.parent / "meeting").open("w").close()
os.read(turns[0], 1)
print(here.name, "begins", (here.parent / "models").exists(), (here.parent / "ended").exists())
if here.name == ".venv-a":
    (here.parent / "meeting").open().close()
    (here.parent / "ended").touch()
    os.write(turns[1], b".")
Path(options["--junit-xml"]).write_text({report!r})
"""


def test_an_environment_starts_beside_the_one_before_it_and_waits_for_its_turn(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in (".venv-a", ".venv-b"):
        program = tmp_path / name / "bin" / "python"
        program.parent.mkdir(parents=True)
        program.write_text(PYTEST.format(python=sys.executable, report=REPORT))
        program.chmod(0o700)
    os.mkfifo(tmp_path / "meeting")
    monkeypatch.setattr(dev.test, "ROOT", tmp_path)
    monkeypatch.setattr(dev.test, "LOGS", tmp_path)
    monkeypatch.setattr(dev.test, "_write_models", (tmp_path / "models").touch)
    outcomes = dev.test._run(dev.test.SUITES["test"], {".venv-a": [], ".venv-b": []})
    assert [(one.venv, one.exit_code, one.passed) for one in outcomes] == [(".venv-a", 0, 1), (".venv-b", 0, 1)]
    assert capfd.readouterr().out.splitlines() == [
        "writing the tiny models",
        *("", "[1/2] .venv-a", ".venv-a begins True False"),
        *("", "[2/2] .venv-b", ".venv-b begins True True"),
    ]


def test_what_is_missing_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    libibverbs = dev.test.system_packages.PACKAGES[0]
    monkeypatch.delenv("VENVS", raising=False)
    monkeypatch.delenv("SKIPS", raising=False)
    monkeypatch.delenv("PYTEST", raising=False)
    monkeypatch.setattr(dev.test.system_packages, "missing", lambda environment: [libibverbs])
    monkeypatch.setattr(dev.test, "_run", lambda suite, selections: pytest.fail("the tests were started"))
    assert dev.test.main("test") == 2
    assert "install libibverbs1 (for tests of the Mooncake connector)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "reason", ["needs root: another user", "vLLM-Omni is not installed", "pip could not fetch the distribution", ""]
)
def test_other_reasons_are_unexpected(reason: str) -> None:
    assert kind_of_skip(reason) is None


@pytest.mark.parametrize(
    "test",
    [
        "properties/test_encoder_cache.py",  # imports a class of vLLM
        "unit/cli/test_doctor.py",
        "differential/test_same_decisions.py",  # imports our scheduler, which is made of vLLM's
    ],
)
def test_what_reaches_vllm_runs_on_both_versions(test: str) -> None:
    assert reaches_vllm(dev.test.ROOT / "tests" / test)


@pytest.mark.parametrize("test", ["properties/test_balance.py", "unit/test_config.py", "unit/video/test_sandbox.py"])
def test_what_does_not_reach_vllm_runs_once(test: str) -> None:
    assert not reaches_vllm(dev.test.ROOT / "tests" / test)


@pytest.mark.parametrize("command", list(dev.test.SUITES))
def test_what_needs_the_cuda_double_runs_in_its_environment_alone(command: str) -> None:
    for venv, selection in dev.test.SUITES[command].environments().items():
        assert ("tests/cuda_double" in selection) == (venv == ".venv-cuda")
        assert ("--ignore=tests/cuda_double" in selection) == ("tests" in selection)


def test_the_cuda_double_is_part_of_the_long_tests() -> None:
    assert ".venv-cuda" in dev.test.SUITES["test-long"].environments()
    assert ".venv-cuda" not in dev.test.SUITES["test"].environments()

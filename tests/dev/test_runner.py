"""Check what `make test` prints about skipped and about slow tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import dev.test
from dev.test import Outcome, reaches_vllm

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

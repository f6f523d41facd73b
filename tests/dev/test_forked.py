"""Check that forked processes share the tests of a session, and that pytest reports what happens in them."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFTEST = """
import os
from pathlib import Path
import pytest

NOTES = Path(__file__).parent / "notes"

def note(line):
    with NOTES.open("a") as notes:
        notes.write(f"{os.getpid()} {line}\\n")

def pytest_configure(config):
    config.addinivalue_line("markers", "waits: waits")

@pytest.fixture(scope="session")
def engine():
    note("start")
    yield
    note("stop")

@pytest.fixture
def noted(request):
    note(request.node.name)
"""


MORE = "def test_more(noted):\n    pass\n"


def _command(folder: Path, files: Mapping[str, str], *options: str) -> list[str]:
    """Write tests, and return the command that runs them in two processes."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.forked", "--processes=2", "-p", "no:cacheprovider"]
    return [*command, f"--rootdir={folder}", f"--junit-xml={folder / 'report.xml'}", *options, str(folder)]


def _run(folder: Path, files: Mapping[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(folder, files, *options), cwd=ROOT, capture_output=True, text=True, check=False)


def _notes(folder: Path) -> dict[str, list[str]]:
    """Return what the tests noted, by the process that they ran in."""
    notes: dict[str, list[str]] = {}
    for line in (folder / "notes").read_text().splitlines():
        pid, _, what = line.partition(" ")
        notes.setdefault(pid, []).append(what)
    return notes


def test_results_and_output_are_reported(tmp_path: Path) -> None:
    text = """
import pytest

def test_passes(tmp_path):
    assert tmp_path.is_dir()

def test_fails():
    print("said before the failure")
    assert 1 == 2

@pytest.mark.skip(reason="no reason")
def test_is_skipped():
    pass
"""
    done = _run(
        tmp_path, {"test_one": text, "test_other": "def test_passes(tmp_path):\n    assert tmp_path.is_dir()\n"}
    )
    assert done.returncode == 1
    assert "1 failed, 2 passed, 1 skipped" in done.stdout
    assert "said before the failure" in done.stdout
    assert "assert 1 == 2" in done.stdout
    (suite,) = ElementTree.parse(tmp_path / "report.xml").getroot().iter("testsuite")
    assert {key: suite.get(key) for key in ("tests", "failures", "skipped")} == {
        "tests": "4",
        "failures": "1",
        "skipped": "1",
    }
    assert [skip.get("message") for skip in suite.iter("skipped")] == ["no reason"]


def test_a_test_whose_process_dies_has_failed(tmp_path: Path) -> None:
    dies = "import os, signal\n\ndef test_dies():\n    os.kill(os.getpid(), signal.SIGKILL)\n\ndef test_lost(): ...\n"
    done = _run(tmp_path, {"test_a": dies, "test_b": "def test_b(): ...\n", "test_c": "def test_c(): ...\n"})
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert "test_a.py::test_dies" in done.stdout
    assert "the process of this test ended with signal SIGKILL" in done.stdout


def test_groups_that_no_process_is_left_for_are_told(tmp_path: Path) -> None:
    dies = "import os\n\ndef test_dies():\n    os._exit(3)\n"
    files = {f"test_{number}": dies for number in range(3)}
    done = _run(tmp_path, files)
    assert done.returncode != 0
    assert "ended with exit code 3" in done.stdout
    assert "groups of tests that did not run: 1" in done.stdout


WAITS = """
import signal
from pathlib import Path

def test_waits(engine, noted):
    {begin}
    signal.pause()
"""
FIFO = "Path(__file__).with_name({name!r}).open({mode!r}).close()"


def _assert_all_ended(folder: Path) -> None:
    """Check that each process has ended its fixture of the session once, and that none took the third file."""
    notes = _notes(folder)
    assert len(notes) == 2
    assert all(one.count("start") == one.count("stop") == 1 for one in notes.values())
    assert not any("test_more" in one for one in notes.values())


def test_the_first_failure_interrupts_the_other_processes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    fails = WAITS.format(begin=FIFO.format(name="begun", mode="r")).replace("signal.pause()", "assert False")
    waits = WAITS.format(begin=FIFO.format(name="begun", mode="w"))
    done = _run(tmp_path, {"test_a": fails, "test_b": waits, "test_c": MORE}, "-x")
    assert done.returncode == 1
    assert "stopping after 1 failures" in done.stdout
    _assert_all_ended(tmp_path)

"""Check that forked processes share the tests of a session, and that pytest reports what happens in them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.forked import INTERRUPTED, GroupQueue

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


MEETS = "Path(__file__).with_name('meeting').open('{}').close()"
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


def test_tests_of_a_file_run_in_one_process_and_those_of_two_files_at_the_same_time(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "meeting")  # whoever opens it waits until the other opens it as well
    files = {
        f"test_{name}": f"""
from pathlib import Path

def test_meets(engine, noted):
    Path(__file__).with_name("meeting").open("{mode}").close()

def test_after_{name}(engine, noted):
    pass
"""
        for name, mode in (("reader", "r"), ("writer", "w"))
    }
    done = _run(tmp_path, files)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    assert sorted(_notes(tmp_path).values()) == [
        ["start", "test_meets", "test_after_reader", "stop"],
        ["start", "test_meets", "test_after_writer", "stop"],
    ]


def test_those_that_wait_have_a_process_beside_the_others_which_help_it_in_the_end(tmp_path: Path) -> None:
    """All three meet, so no process has two of them; the others take what waits once nothing else is left."""
    for name in ("first", "second", "third", "end"):
        os.mkfifo(tmp_path / name)
    meet = """
from pathlib import Path

def test_{name}(engine, noted):
    for name, mode in {meetings}:
        Path(__file__).with_name(name).open(mode).close()
"""
    marked = "import pytest\n\npytestmark = pytest.mark.waits\n"
    files = {
        "test_a": meet.format(name="a", meetings=[("first", "w"), ("second", "w")]),
        "test_b": meet.format(name="b", meetings=[("first", "r"), ("third", "r")]),
        "test_c": marked + meet.format(name="c", meetings=[("second", "r"), ("third", "w"), ("end", "r")]),
        "test_d": marked + meet.format(name="d", meetings=[("end", "w")]),
    }
    done = _run(tmp_path, files)
    assert done.returncode == 0, done.stdout
    assert "4 passed" in done.stdout
    notes = _notes(tmp_path).values()
    assert len(notes) == 3
    assert all(one.count("start") == one.count("stop") == 1 for one in notes)
    (beside,) = (one for one in notes if "test_c" in one)
    assert beside == ["start", "test_c", "stop"]


def test_a_fixture_of_the_session_survives_from_group_to_group(tmp_path: Path) -> None:
    files = {f"test_{number}": "def test_it(engine, noted):\n    pass\n" for number in range(6)}
    assert _run(tmp_path, files).returncode == 0
    notes = _notes(tmp_path)
    assert sum(one.count("test_it") for one in notes.values()) == 6
    assert all(one.count("start") == one.count("stop") == 1 for one in notes.values())


def test_a_session_begins_when_a_process_of_the_one_before_has_ended(tmp_path: Path) -> None:
    """The first session ends only when a test of the second one runs, and nobody passes a turn to a third one."""
    os.mkfifo(tmp_path / "meeting")
    files = {
        "test_ends": "def test_ends(engine, noted):\n    pass\n",
        "test_meets": f"from pathlib import Path\n\ndef test_meets(engine, noted):\n    {MEETS.format('r')}\n",
        "test_later": f"from pathlib import Path\n\ndef test_later(engine, noted):\n    {MEETS.format('w')}\n",
        "test_last": MORE,
    }
    *command, folder = _command(tmp_path, files)
    first_turn, passed = os.pipe(), os.pipe()
    second = [*command, f"--turns={passed[0]}", f"{folder}/test_later.py", f"{folder}/test_last.py"]
    first = [*command, f"--turns={first_turn[0]},{passed[1]}", f"{folder}/test_ends.py", f"{folder}/test_meets.py"]
    with (
        subprocess.Popen(second, cwd=ROOT, stdout=subprocess.PIPE, pass_fds=passed[:1]) as later,
        subprocess.Popen(first, cwd=ROOT, stdout=subprocess.PIPE, pass_fds=(first_turn[0], passed[1])) as earlier,
    ):
        for pipe in (*first_turn, *passed):
            os.close(pipe)
        said = [process.communicate()[0].decode() for process in (earlier, later)]
    assert ["2 passed" in one for one in said] == [True, True], said
    notes = [line.partition(" ")[2] for line in (tmp_path / "notes").read_text().splitlines()]
    assert notes.index("stop") < min(notes.index("test_later"), notes.index("test_more"))
    assert len([one for one in notes if one.startswith("test_")]) == 4


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


def test_an_error_at_the_end_of_a_session_fixture_fails_the_session(tmp_path: Path) -> None:
    text = """
import pytest

@pytest.fixture(scope="session")
def fails():
    yield
    raise ValueError("the engine did not end")

def test_passes(fails): ...
"""
    done = _run(tmp_path, {"test_a": text, "test_b": "def test_b(): ...\n"})
    assert done.returncode != 0
    assert "the engine did not end" in done.stderr
    assert "a process ended with exit code 1 while it ran no test" in done.stdout


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


def test_the_fixtures_of_a_process_with_a_failure_end_undisturbed(tmp_path: Path) -> None:
    """The one of the failure ends when the other process has been interrupted, as the first one is."""
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "interrupted")
    fails = WAITS.format(begin=FIFO.format(name="begun", mode="r")).replace("signal.pause()", "assert False")
    waits = WAITS.format(begin=FIFO.format(name="begun", mode="w"))
    ends = """
import pytest

@pytest.fixture(scope="session", autouse=True)
def {name}(engine):
    yield
    {end}
"""
    files = {
        "test_a": fails + ends.format(name="ends_late", end=FIFO.format(name="interrupted", mode="r")),
        "test_b": waits + ends.format(name="lets_end", end=FIFO.format(name="interrupted", mode="w")),
        "test_c": MORE,
    }
    assert _run(tmp_path, files, "-x").returncode == 1
    _assert_all_ended(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_or_death_of_the_parent_reaches_all_processes(tmp_path: Path, number: signal.Signals) -> None:
    names = ("a", "b")
    for name in names:
        os.mkfifo(tmp_path / name)
    files = {f"test_{name}": WAITS.format(begin=FIFO.format(name=name, mode="w")) for name in names}
    command = _command(tmp_path, {**files, "test_c": MORE})
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for name in names:
            (tmp_path / name).open().close()  # waits until the test has begun
        process.send_signal(number)
        said, _ = process.communicate()  # ends when no process has the pipe any more
    assert process.returncode == (INTERRUPTED if number == signal.SIGINT else -number)
    assert ("KeyboardInterrupt" in said) == (number == signal.SIGINT)
    _assert_all_ended(tmp_path)


def test_each_group_is_taken_once() -> None:
    queue = GroupQueue([4, 5, 6])
    assert [queue.take() for _ in range(4)] == [4, 5, 6, None]
    queue.close()
    queue = GroupQueue(range(3))
    assert queue.clear() == 3
    assert queue.take() is None
    queue.close()


def test_more_groups_than_the_queue_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="20000 groups"):
        GroupQueue(range(20000))

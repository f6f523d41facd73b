"""The parts that all benchmarks share."""

import itertools
import json
import math
import os
import signal
import sys
import textwrap
import venv
from argparse import Namespace

import pytest

from benchmarks.harness import load, provenance, style
from benchmarks.harness.child import Child, ChildFailed
from benchmarks.harness.stats import Summary, bounds, fitted_exponent, quantile


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law_is_found(exponent):
    assert fitted_exponent({n: 3e-5 * n**exponent for n in (1024, 4096, 32768)}) == pytest.approx(exponent, abs=1e-9)


def test_the_exponent_ignores_sizes_where_fixed_cost_hides_growth():
    assert fitted_exponent({1: 99.0, 1024: 1.0, 2048: 2.0}) == pytest.approx(1.0)


@pytest.mark.parametrize("costs", [{}, {1024: 1.0}, {1: 1.0, 2: 2.0}, {1024: 0.0, 2048: 1.0}])
def test_no_exponent_without_two_points(costs):
    assert fitted_exponent(costs) is None


def test_quantiles_interpolate():
    assert quantile([4, 1, 3, 2], 0.5) == 2.5
    assert (quantile([1, 2, 3], 0), quantile([1, 2, 3], 1)) == (1, 3)


def test_a_summary_has_the_spread():
    assert Summary.of([1.0, 2.0, 3.0, 4.0, 100.0]) == Summary(median=3.0, least=1.0, most=100.0, iqr=2.0, samples=5)
    with pytest.raises(ValueError, match="at least one"):
        Summary.of([])


def test_results_name_their_least_and_most_and_older_files_are_read():
    record = Summary.of([2683.6, 2803.4, 3933.4]).as_dict()  # tokens per second: the most is the best
    assert bounds(record) == (2683.6, 3933.4)
    files = (provenance.ROOT / "benchmarks" / "results").glob("*.json")
    summaries = [one for file in files for one in provenance.summaries(json.loads(file.read_text()))]
    assert summaries
    for one in summaries:
        least, most = bounds(one)
        assert least <= one["median"] <= most


def test_labels_are_moved_apart_and_keep_their_order():
    placed = style.spread_labels([0.50, 0.51, 0.10, 0.52], gap=0.1)
    assert placed[2] == 0.10
    assert [placed[0], placed[1], placed[3]] == pytest.approx([0.41, 0.51, 0.61])


def test_labels_far_apart_stay():
    assert style.spread_labels([0.9, 0.1], gap=0.1) == [0.9, 0.1]


def test_a_pushed_group_pushes_the_one_below():
    placed = style.spread_labels([0.30, 0.41, 0.42, 0.43], gap=0.1)
    assert all(after - before >= 0.1 - 1e-9 for before, after in itertools.pairwise(placed))
    assert math.fsum(placed) == pytest.approx(0.30 + 0.41 + 0.42 + 0.43)


def test_a_result_file_names_no_path_of_this_machine(tmp_path, monkeypatch):
    main = str(provenance.ROOT / "benchmarks" / "realtime" / "__main__.py")
    monkeypatch.setattr("sys.argv", [main, "--source=1.0=/home/me/vllm-1.0", "--out", str(tmp_path), "--seed", "7"])
    path = provenance.write_result(tmp_path / "x.json", "realtime", [1], seed=7)
    record = json.loads(path.read_text())
    expected = f"python -m benchmarks.realtime --source=1.0=vllm-1.0 --out {tmp_path.name} --seed 7"
    assert record["provenance"]["command"] == expected
    assert record["provenance"]["seed"] == 7
    assert record["results"] == [1]


def test_a_result_names_the_versions_of_the_interpreter_that_was_measured(tmp_path):
    """An environment without any of the packages has no versions; one that has another vLLM, that of it."""
    venv.create(tmp_path / "empty", with_pip=False)
    python = tmp_path / "empty" / "bin" / "python"
    assert provenance.versions_in(str(python)) == {}
    (packages,) = (tmp_path / "empty" / "lib").glob("python*/site-packages")
    (packages / "vllm-9.8.7.dist-info").mkdir()
    (packages / "vllm-9.8.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.8.7\n")
    path = provenance.write_result(tmp_path / "x.json", "realtime", [1], seed=7, python=str(python))
    assert json.loads(path.read_text())["provenance"]["versions"] == {"vllm": "9.8.7"}
    assert "torch" in provenance.versions_in(sys.executable)


def test_what_a_run_writes_ends_with_its_spread(tmp_path, capsys):
    summary = Summary.of([1.0, 2.0, 3.0]).as_dict()
    provenance.write_result(tmp_path / "x.json", "realtime", [{"stock": summary}, Summary.of([4.0]).as_dict()])
    said = "spread of 1 figures, quartiles' distance over median: 50% at P50, 50% at most"
    assert said in capsys.readouterr().out


def test_a_copy_without_history_has_a_revision_that_git_has_printed(tmp_path, monkeypatch):
    commit = "6934f027b3ef855729b235cc17d5ed0c3c7fa98b"
    monkeypatch.setenv("BENCHMARK_REVISION", commit)
    assert provenance.provenance()["revision"] == commit[:12]
    monkeypatch.setenv("BENCHMARK_REVISION", "6934f0275aa0")
    with pytest.raises(SystemExit, match="set it to the output of `git rev-parse HEAD`"):
        provenance.provenance()


@pytest.mark.parametrize("after", [0, 2])
def test_a_benchmark_waits_until_the_machine_is_idle(after, capsys):
    most = load.MOST_PER_CORE * os.cpu_count()
    loads, slept = iter([most + 1] * (2 * after) + [most] * 2), []
    load.wait_for_idle_machine(Namespace(despite_load=False), lambda: next(loads), slept.append)
    assert bool(slept) == bool(after) == ("waiting for an idle machine" in capsys.readouterr().out)


def test_a_benchmark_does_not_start_on_a_busy_machine_unless_asked_to():
    def busy():
        return 20.0 * os.cpu_count()

    slept = []
    with pytest.raises(SystemExit, match="measure on an idle machine, or add --despite-load"):
        load.wait_for_idle_machine(Namespace(despite_load=False), busy, slept.append)
    assert sum(slept) == load.PATIENCE_SECONDS
    load.wait_for_idle_machine(Namespace(despite_load=True), busy, pytest.fail)


@pytest.fixture
def module(tmp_path):
    def write(body):
        (tmp_path / "a_child.py").write_text(textwrap.dedent(body))
        return Child("a_child", path=[tmp_path])

    return write


def test_a_child_answers_and_its_log_is_kept_apart(module):
    child = module("""
        import sys
        from benchmarks.harness.child import emit
        print("log line")
        for line in sys.stdin:
            emit("answer", got=line.strip())
    """)
    with child:
        assert child.ask(do="x") == {"kind": "answer", "got": '{"do": "x"}'}
        assert child.log_tail() == "log line\n"


def test_a_child_that_fails_says_why(module):
    with module("raise SystemExit('no such model')") as child, pytest.raises(ChildFailed, match="no such model"):
        list(child.events())


def test_a_child_that_is_gone_cannot_be_asked(module):
    with module("raise SystemExit('over')") as child:
        child.process.wait()
        with pytest.raises(ChildFailed, match="over"):
            child.ask(do="x")


def test_stopping_a_child_ends_what_it_started(module):
    child = module("""
        import subprocess, sys, time
        from benchmarks.harness.child import emit
        emit("started", pid=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
        time.sleep(600)
    """)
    with child:
        grandchild = child.next_event()["pid"]
    assert child.process.returncode == -signal.SIGINT
    assert not is_running(grandchild)


def is_running(pid):
    """False also for a zombie that nobody has reaped yet."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it may go between the opening and the reading
        return False

"""The parts that all benchmarks share."""

import json
import signal
import textwrap

import pytest

from benchmarks.harness import provenance
from benchmarks.harness.child import Child
from benchmarks.harness.stats import Summary, bounds, fitted_exponent, quantile


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law_is_found(exponent):
    assert fitted_exponent({n: 3e-5 * n**exponent for n in (1024, 4096, 32768)}) == pytest.approx(exponent, abs=1e-9)


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


def test_a_result_file_names_no_path_of_this_machine(tmp_path, monkeypatch):
    main = str(provenance.ROOT / "benchmarks" / "realtime" / "__main__.py")
    monkeypatch.setattr("sys.argv", [main, "--source=1.0=/home/me/vllm-1.0", "--out", str(tmp_path), "--seed", "7"])
    path = provenance.write_result(tmp_path / "x.json", "realtime", [1], seed=7)
    record = json.loads(path.read_text())
    expected = f"python -m benchmarks.realtime --source=1.0=vllm-1.0 --out {tmp_path.name} --seed 7"
    assert record["provenance"]["command"] == expected
    assert record["provenance"]["seed"] == 7
    assert record["results"] == [1]


@pytest.fixture
def module(tmp_path):
    def write(body):
        (tmp_path / "a_child.py").write_text(textwrap.dedent(body))
        return Child("a_child", path=[tmp_path])

    return write


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

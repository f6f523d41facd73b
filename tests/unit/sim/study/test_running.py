"""What is found at points, by runs that nobody simulated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.scenarios import GOOD
from tests.support.sim_results import dies, record, run, synthetic
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.measure import Histogram, Result
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.study.evaluate import Finding
from vllm_omni_sched.sim.study.plan import load_study
from vllm_omni_sched.sim.study.report import interval, ratio_interval, spread
from vllm_omni_sched.sim.study.running import run_study


def findings(tmp_path: Path, more: str = "", simulate: Any = run, before: str = "", jobs: int = 1) -> list[Finding]:
    path = tmp_path / "one.toml"
    path.write_text(before + GOOD + more)
    return list(run_study(load_study(path), simulate, jobs))


def result(scenario: Scenario, *records: Any, **changes: Any) -> Result:
    values = {"gaps": Histogram(), "seconds": 1.0, "measured_seconds": 1.0, "events": 1, **changes}
    return Result(scenario.name, scenario.seed, scenario.slo, list(records), **values)


def at_rate(scenario: Scenario, **_: Any) -> float:
    assert scenario.workload.rate is not None
    return scenario.workload.rate


def test_a_point_has_its_summary(tmp_path: Path) -> None:
    (one,) = findings(tmp_path)
    assert one.summary["requests"] == 400
    assert (one.runs, one.error) == (1, "")


def test_max_rate_ends_where_the_slo_is_met_no_more(tmp_path: Path) -> None:
    rates: list[float] = []

    def simulate(scenario: Scenario, *_: Any) -> Result:
        rates.append(at_rate(scenario))
        good = 10 if at_rate(scenario) <= 11 else 8
        return result(scenario, *[record(n, first=n + (0.5 if n < good else 9.0)) for n in range(10)])

    (one,) = findings(tmp_path, '[search]\nkind = "max_rate"\n', simulate)
    assert one.found is not None
    assert 11 / 1.05 <= one.found["holds"] <= 11 < one.found["fails_at"]
    # attainment falls from 1.0 to 0.8 between them, and 0.9 is asked for
    assert one.found["value"] == pytest.approx((one.found["holds"] + one.found["fails_at"]) / 2)
    assert one.found["monotone"] is True
    assert one.runs == len(rates) == len(one.found["tried"])
    assert one.summary["within_slo"] == 1.0  # of the run at the rate that was found


def test_max_rate_where_none_is_met_keeps_the_gentlest_run(tmp_path: Path) -> None:
    def simulate(scenario: Scenario, *_: Any) -> Result:
        return result(scenario, record(first=99.0), events=int(1000 * at_rate(scenario)))

    (one,) = findings(tmp_path, '[search]\nkind = "max_rate"\ndoublings = 2\n', simulate)
    assert one.found is not None
    assert one.found["value"] == 0
    assert one.summary["events"] == 1000


def test_the_tightest_slo_is_a_quantile_of_one_run(tmp_path: Path) -> None:
    def simulate(scenario: Scenario, *_: Any) -> Result:  # promised are 2 s and 0.1 s, to 90%
        return result(scenario, *[record(n, first=n + 0.2 * (n + 1), largest_gap=0.01) for n in range(10)])

    (one,) = findings(tmp_path, '[search]\nkind = "tightest_slo"\n', simulate)
    assert one.found is not None
    assert one.found["value"] == pytest.approx(0.9)
    assert one.found["ttft_seconds"] == pytest.approx(1.8)
    assert one.runs == 1


def test_the_tightest_slo_is_searched_at_a_fraction_of_the_rate(tmp_path: Path) -> None:
    rates: list[float] = []

    def simulate(scenario: Scenario, *_: Any) -> Result:
        rates.append(scenario.workload.rate)
        return result(scenario, *[record(n) for n in range(10)])

    findings(tmp_path, '[search]\nkind = "tightest_slo"\n', simulate)
    findings(tmp_path, '[search]\nkind = "tightest_slo"\nload = 0.85\n', simulate)
    assert rates[1] == pytest.approx(0.85 * rates[0])


def test_an_slo_that_cannot_be_met_has_no_factor(tmp_path: Path) -> None:
    (one,) = findings(tmp_path, '[search]\nkind = "tightest_slo"\n', lambda s, *_: result(s, record(), lost=1))
    assert one.found is not None
    assert one.found["value"] is None


def test_throughput_counts_what_ends_in_the_middle(tmp_path: Path) -> None:
    seen: list[Scenario] = []

    def simulate(scenario: Scenario, *_: Any) -> Result:  # of 100 s; a request a second is served
        seen.append(scenario)
        return result(scenario, *[record(n, arrival=0.0, end=float(n), output_tokens=7) for n in range(100)], lost=900)

    (one,) = findings(tmp_path, '[search]\nkind = "throughput"\n', simulate)
    assert one.found is not None
    assert (one.found["requests_per_second"], one.found["value"]) == (1.0, 7.0)
    assert one.found["saturated"] is True
    assert (seen[0].workload.rate, seen[0].warm_up_seconds, seen[0].drain_seconds) == (40.0, 0.0, 0.0)


def test_a_point_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    def simulate(scenario: Scenario, *_: Any) -> Result:
        if scenario.workload.rate == 2:
            raise ConfigError("too  little\nmemory")
        if scenario.workload.rate == 3:
            raise ZeroDivisionError("by zero")
        return synthetic(scenario)

    found = findings(tmp_path, '[sweep]\n"workload.rate" = [1, 2, 3, 4]\n', simulate)
    assert [one.error for one in found] == ["", "too little memory", "ZeroDivisionError: by zero", ""]
    assert [bool(one.summary) for one in found] == [True, False, False, True]
    assert found[1].label == "workload.rate 2"


def test_defects_of_the_simulator_are_not_findings(tmp_path: Path) -> None:
    def simulate(scenario: Scenario, *_: Any) -> Result:
        raise TypeError("a defect")

    with pytest.raises(TypeError, match="a defect"):
        findings(tmp_path, simulate=simulate)


def test_several_processes_find_the_same(tmp_path: Path) -> None:
    sweep = '[sweep]\n"workload.rate" = [1, 2, 3]\n'
    alone = findings(tmp_path, sweep)
    together = findings(tmp_path, sweep, jobs=2)
    assert sorted(together, key=lambda one: one.label) == alone


def test_a_process_that_dies_is_told(tmp_path: Path) -> None:
    found = findings(tmp_path, '[sweep]\n"workload.rate" = [1, 2]\n', dies, jobs=2)
    assert {one.error for one in found} == {
        "its process died; there may be too little memory: try fewer --jobs"
    }  # fmt: skip
    assert sorted(one.label for one in found) == ["workload.rate 1", "workload.rate 2"]


def test_seeds_are_spread(tmp_path: Path) -> None:
    found = findings(tmp_path, '[sweep]\n"workload.rate" = [1, 2]\n', before="repeats = 3\n")
    rows = spread(found)
    assert [row["values"] for row in rows] == [{"workload.rate": 1}, {"workload.rate": 2}]
    assert rows[0]["seeds"] == [3, 4, 5]
    times = sorted(one.summary["ttft_seconds"]["p99"] for one in found[:3])
    spread_of = rows[0]["ttft_p99_seconds"]
    assert {key: spread_of[key] for key in ("median", "least", "most")} == {
        "median": times[1],
        "least": times[0],
        "most": times[2],
    }
    mean, half = interval(times)
    assert [spread_of[key] for key in ("mean", "low", "high")] == [mean, mean - half, mean + half]
    assert "value" not in rows[0]


def test_an_interval_is_that_of_students_t() -> None:
    assert interval([3.0]) == (3.0, 0.0)
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert half == pytest.approx(2.776 * math.sqrt(2.5 / 5))


def test_a_ratio_is_of_pairs_of_seeds() -> None:
    # the seeds differ by far more than the two systems do under each of them
    ratio, low, high = ratio_interval([2.0, 20.0, 200.0], [1.0, 10.1, 99.0])
    assert low < ratio < high
    assert ratio == pytest.approx(2.0, rel=0.01)
    assert high - low < 0.1
    with pytest.raises(ValueError, match="equally many values"):
        ratio_interval([1.0], [1.0, 2.0])


def test_a_whole_number_is_asked_for_where_the_key_has_one(tmp_path: Path) -> None:
    asked: list[Any] = []

    def simulate(scenario: Scenario, *_: Any) -> Result:
        asked.append(scenario.stage("llm").max_num_seqs)  # type: ignore[union-attr]
        good = 10 if asked[-1] <= 37 else 5
        return result(scenario, *[record(n, first=n + (0.5 if n < good else 9.0)) for n in range(10)])

    more = '[search]\nkind = "max_rate"\nkey = "stages.llm.max_num_seqs"\nprecision = 0.02\nstep = 1.3\n'
    path = tmp_path / "one.toml"
    path.write_text(GOOD + more)
    (one,) = run_study(load_study(path, {"stages.llm.max_num_seqs": 10}), simulate)
    assert one.error == ""
    assert one.found is not None
    assert all(isinstance(number, int) for number in asked)
    assert round(one.found["holds"]) == 37


def test_a_slow_system_is_measured_on_as_many_requests_as_a_fast_one(tmp_path: Path) -> None:
    finished: dict[float, int] = {}
    for speed in (4.0, 20.0):
        rates: list[float] = []

        def simulate(scenario: Scenario, *_: Any, speed: float = speed, rates: list[float] = rates) -> Result:
            rate, seconds = at_rate(scenario), scenario.duration_seconds
            rates.append(rate)
            ends = [n / speed for n in range(int(speed * seconds))]
            records = [record(n, arrival=n / rate, first=end, end=end) for n, end in enumerate(ends)]
            return result(scenario, *records, lost=max(int(rate * seconds) - len(records), 0))

        (one,) = findings(tmp_path, '[search]\nkind = "throughput"\n', simulate, before="requests = 4000\n")
        assert one.found is not None
        assert rates == [40.0, pytest.approx(1.5 * speed, rel=0.03)]
        assert one.found["requests_per_second"] == pytest.approx(speed, rel=0.01)
        finished[speed] = one.found["requests"]
    # half of the time, of 4,000 requests that come half as fast again as they are served
    assert finished == {speed: pytest.approx(4000 / 1.5 / 2, rel=0.03) for speed in (4.0, 20.0)}

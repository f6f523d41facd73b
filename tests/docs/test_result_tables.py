"""Tables of benchmark results: the number in the cell is the number in the file."""

import importlib
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
NAMES = ("result_tables", "stage_tables", "gains", "fidelity_tables")
result_tables, stage_tables, gains, fidelity_tables = map(importlib.import_module, NAMES)
sys.path.remove(str(DOCS))

PROVENANCE = {
    "command": "python -m benchmarks.x",
    "date": "2026-01-02T03:04:05+00:00",
    "revision": "abc",
    "seed": 7,
    "cpu": "A CPU",
    "cores": 2,
    "load_average": [0.5, 1.0, 2.0],
}


def result(*records, benchmark="step_cost"):
    return {"benchmark": benchmark, "provenance": PROVENANCE, "results": list(records)}


def cell(kind, size, *rounds, scenario="realtime_frame", runner="V2", **more):
    unit = "bytes" if scenario == "message_bytes" else "seconds"
    return {
        "scenario": scenario, "kind": kind, "version": "0.33.0", "runner": runner, "size": size, "unit": unit,
        "median": sorted(rounds)[len(rounds) // 2], "rounds": list(rounds), **more
    }  # fmt: skip


STEPS = result(
    cell("stock", 1, 0.0001, 0.0001),
    cell("ours", 1, 0.00012, 0.0001),
    cell("stock", 1024, 0.9, 0.9),
    cell("ours", 1024, 0.9, 0.9),
    cell("stock", 32768, 0.08, 0.08),
    cell("ours", 32768, 0.00016, 0.00008),
    cell("stock", 64, 9.0, scenario="decode", runner="V1"),
    cell("ours", 32768, 4096.0, scenario="message_bytes"),
)


def test_step_cost_has_the_least_and_the_largest_size_with_the_ratios_of_the_rounds():
    text = result_tables.step_cost([STEPS])
    assert "| vLLM 0.33.0, model runner V2 | n | stock | ours | of stock, by round |" in text
    assert "| one more frame of a session of n items | 1 | 100 µs | 120 µs | 1.00 to 1.20 |" in text
    assert "| one more frame of a session of n items | 32,768 | 80 ms | 160 µs | 0.001 to 0.002 |" in text
    assert "decode" not in text, "model runner V1"
    assert "message" not in text, "stock was not measured"
    assert "2026-01-02, revision abc; 2 cores of A CPU, load average 0.5 at the end" in text


def on_a_gpu(name, *records, **measured):
    part = {"part": name, "command": f"python -m {name}", "results": list(records), "measured": measured}
    told = {**PROVENANCE, "gpu": {"name": "Some GPU"}}
    return {"benchmark": "gpu", "provenance": told, "results": {"parts": [part, {**part, "part": "x"}]}}


def measured_mixed(measures, load=1.0, rounds=5, variant="ours", **told):
    """Return a result of `mixed`: measure -> stock, ours, their quartiles' distance, n, ratio and interval, or None."""
    records = []
    for measure, (stock, ours, spread, n, ratio) in measures.items():
        pooled = {"ratio": ratio[0], "ratio_interval": list(ratio[1:])} if ratio else {}
        both = {"load": load, "measure": measure + result_tables.TOGETHER * bool(ratio), "iqr": spread, "samples": n}
        records += [
            {**both, "variant": "stock", "median": stock},
            {**both, "variant": variant, "median": ours, **pooled},
        ]
    each = {"load": load, "measure": "tokens / s", "median": 1.0, "samples": rounds, "iqr": 0.0}
    records += [{**each, "variant": one} for one in ("stock", variant)]
    return {"benchmark": "mixed", "provenance": {**PROVENANCE, "workload": told}, "results": records}


SHOWN = {
    "image TTFT P50": (700.0, 350.0, 0.0, 71, (0.5, 0.4, 0.7)),
    "image TTFT P99": (2000.0, 1000.0, 0.0, 71, (0.5, 0.4, 0.6)),
    "ITL beside images P99": (700.0, 21.0, 0.0, 185, (0.03, 0.02, 0.04)),
    "text ITL P99": (3.0, 12.0, 0.2, 8, None),
    "text ITL P50": (1.2, 1.3, 0.4, 8, None),
}


def test_mixed_has_a_row_for_each_run_with_the_ratio_and_its_interval():
    found = measured_mixed(SHOWN, tensor_parallel=2, frames=32, session=True)
    text = result_tables.mixed([found])
    where = "2 cores of A CPU, 2 tensor-parallel ranks: shared; load 1; beside a request of 32 pictures and a realtime"
    row = next(line for line in text.splitlines() if where in line)
    assert "| 5; 71 | 700 → 350, 0.50x [0.40, 0.70] | – |" in row, "a P99 of 71 requests is the largest"
    assert "| 700 → 21, 0.03x [0.02, 0.04] |" in row
    assert "| 3 → 12, 4.00x |" in row


def test_a_whole_vllm_on_a_gpu_says_where_its_part_was_measured_and_has_no_interval_of_one_round():
    part = measured_mixed(SHOWN, rounds=1)["results"]
    text = result_tables.mixed([], [on_a_gpu("vllm", *part, revision="def")])
    assert "| one Some GPU: shared; load 1 | 1; 71 | 700 → 350, 0.50x | – |" in text
    assert "`python -m vllm`" in text
    assert "revision def" in text


@pytest.mark.parametrize(("seen", "most"), [(0, 2.996), (1, 4.744), (2, 6.296), (10, 16.962)])
def test_a_rate_is_bounded_by_the_poisson_limit(seen, most):
    assert stage_tables.most_events(seen) == pytest.approx(most, abs=1e-3)


def row_of(table: str, *words: str) -> list[str]:
    (row,) = [line for line in table.splitlines() if all(word in line for word in words)]
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def test_an_interval_decides_what_is_better_what_is_worse_and_what_is_not_decided() -> None:
    wide = {"image TTFT P50": (700.0, 600.0, 0.0, 21, (0.86, 0.7, 1.1))}
    idle = measured_mixed(SHOWN | {"within SLO %": (80.0, 100.0, 0.0, 400, (1.25, 1.1, 1.4))})
    shared = measured_mixed(SHOWN | wide, tensor_parallel=2)
    text = gains.gains({"mixed": [idle, measured_mixed(SHOWN, rounds=2), measured_mixed(SHOWN, frames=32), shared]})
    row = row_of(text, "`chat`")
    assert row[2] == "2 cores of A CPU: a core that stock leaves idle; load 1, 5 rounds, 71 requests with pictures"
    better = ("picture TTFT P50 0.50x [0.40, 0.70]", "ITL while pictures wait P99 0.03x [0.02, 0.04]")
    assert row[3] == "; ".join((*better, "requests within their SLO 1.25x [1.10, 1.40]"))
    assert row[4:] == ["text ITL P99 4.00x", "text ITL P50 1.08x"]
    assert "picture TTFT P50 0.86x [0.70, 1.10]" in row_of(text, "2 tensor-parallel ranks: shared")[5]
    assert sum(gains.NOT_MEASURED in line for line in text.splitlines()) == 3  # all others


def test_one_round_on_a_gpu_has_no_interval() -> None:
    part = measured_mixed({"image TTFT P50": (150.0, 300.0, 0.0, 29, (2.0, 2.0, 2.0))}, rounds=1)["results"]
    row = row_of(gains.gains({"gpu": [on_a_gpu("vllm", *part)]}), "one Some GPU: shared")
    assert row[2].endswith("1 round, no interval, 29 requests with pictures")
    assert row[3:] == ["", "picture TTFT P50 2.00x", ""]


def test_what_clients_measure_has_n_and_intervals() -> None:
    both = {"workload": "custom", "samples": 21}
    records = [
        {**both, "measure": f"{measure}, all rounds together", "variant": variant, "median": median, **more}
        for measure in ("image TTFT P50", "image TTFT P99")
        for variant, median, more in (
            ("stock", 1500.4, {}),
            ("ours", 300.0, {"ratio": 0.2, "ratio_interval": [0.1, 1.2]}),
        )
    ]
    records += [{**one, "measure": f"tokens / s{result_tables.TOGETHER}", "samples": 5} for one in records[:2]]
    told = {**PROVENANCE, "workload": {"seconds": 12.0}}
    text = result_tables.serve([{"provenance": told, "results": records}])
    assert "| `vllm bench serve`, 5 rounds of 12 s; ms unless said | n | stock | ours |" in text
    assert "| custom; image TTFT P50 | 21 | 1,500 | 300, 0.20x [0.10, 1.20] |" in text
    assert "P99" not in text, "21 values"
    assert "tokens / s" not in text, "both are bound by arrivals"

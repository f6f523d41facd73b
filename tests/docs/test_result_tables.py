"""Tables of benchmark results: the number in the cell is the number in the file."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS.parent / "benchmarks" / "results"
sys.path.insert(0, str(DOCS))
NAMES = ("result_tables", "stage_tables", "connector_tables", "gains", "fidelity_tables")
result_tables, stage_tables, connector_tables, gains, fidelity_tables = map(importlib.import_module, NAMES)
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


def test_a_source_names_versions_what_was_before_and_what_is_known_of_its_revision():
    told = {"versions": {"vllm": "0.33.0+cpu"}, "load_average_before": [0.25, 0, 0], "revision_note": "typed by hand"}
    text = result_tables.source({"provenance": PROVENANCE | told, "results": []})
    assert "revision abc (typed by hand); vLLM 0.33.0, 2 cores of A CPU, load average 0.25 before, 0.5 at the" in text
    text = result_tables.source({"provenance": PROVENANCE | {"simulated": True}, "results": []})
    assert "revision abc; simulated; medians" in text


def run(variant, sessions, costs):
    buckets = [{"frames": f, "seconds_per_frame": {"median": cost}} for f, cost in costs.items()]
    return {"variant": variant, "sessions": sessions, "buckets": buckets}


def test_realtime_shows_the_frames_reached():
    runs = run("stock", 1, {1000: 0.0197}), run("ours", 1, {1000: 0.011, 2000: 0.014})
    text = result_tables.realtime([result(*runs, benchmark="realtime")])
    assert "| sessions | 250 frames | 1,000 frames | 2,000 frames |" in text
    assert "| 1 × stock |  | 19.7 |  |  |  |\n| 1 × ours |  | 11 | 14 |  |  |" in text


def test_pictures_are_those_of_the_newest_version():
    names = ["r-0.9.0-1x1.png", "r-0.33.0-5000x1.png", "r-0.33.0-3000x1-8.png", "r-0.9.0-9x9.png"]
    assert result_tables.of_newest(names) == names[1:3]
    assert sorted(names[1:3], key=result_tables.load_of)[-1] == names[2]
    assert result_tables.of_newest(["one.png"]) == ["one.png"]
    assert result_tables.of_newest([]) == []


def on_a_gpu(name, *records, **measured):
    part = {"part": name, "command": f"python -m {name}", "results": list(records), "measured": measured}
    told = {**PROVENANCE, "gpu": {"name": "Some GPU"}}
    return {"benchmark": "gpu", "provenance": told, "results": {"parts": [part, {**part, "part": "x"}]}}


def test_lanes_on_a_gpu_are_shown_with_the_ratio_to_running_alone_and_refusals_with_their_reason():
    lane = {
        "variant": "lane, share 0.5",
        "itl_p50_seconds": {"median": 0.011},
        "itl_p50_of_alone": 1.1,
        "itl_p99_seconds": {"median": 0.0125},
        "itl_p99_of_alone": 1.136,
        "images_per_second": {"median": 61.0},
        "images_of_alone": 0.6,
    }
    found = on_a_gpu("lanes", lane, {"variant": "lane, 16 SMs", "refused": "no green contexts"})
    text = result_tables.gpu_lanes([found])
    assert "| Some GPU | ITL P50 ms |" in text
    assert "| lane, share 0.5 | 11 (1.10) | 12.5 (1.14) | 61 (0.60) |" in text
    assert "| lane, 16 SMs | no green contexts |  |  |" in text


def test_tensors_on_a_gpu_are_shown_with_bandwidth_and_order():
    timed = {"size": "1 MB", "measure": "end to end", "median": 0.0002, "gigabytes_per_second": 5.24, "wrong": 0}
    found = on_a_gpu(
        "ipc",
        {**timed, "variant": "cuda_ipc"},
        {**timed, "variant": "arena", "wrong": 3},
        {"variant": "cuda_ipc", "measure": "order", "messages": 10, "early": 10, "wrong": 0},
        {"size": "1 GB", "variant": "arena", "refused": "too little shared memory"},
    )
    text = result_tables.gpu_ipc([found])
    assert "| Some GPU, µs | cuda_ipc | arena |\n" in text
    assert "| 1 MB | 200 (5.24 GB/s) | 200 (5.24 GB/s, 3 wrong) |" in text
    assert "| order | 0 of 10 wrong |  |" in text


@pytest.mark.parametrize(
    "make",
    [
        *(result_tables.step_cost, result_tables.realtime, result_tables.mixed, result_tables.serve),
        *(result_tables.gpu_ipc, result_tables.gpu_lanes, stage_tables.stages, fidelity_tables.backtest),
    ],
)
def test_without_results_the_page_says_so(make):
    assert make([]) == result_tables.NOTHING


def test_load_takes_one_benchmark_by_file_name(tmp_path):
    for name, benchmark in (("b", "realtime"), ("a", "realtime"), ("c", "overhead")):
        body = {**result(benchmark=benchmark), "name": name}
        (tmp_path / f"{name}.json").write_text(json.dumps(body))
    assert [found["name"] for found in result_tables.load(tmp_path, "realtime")] == ["a", "b"]


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


def test_the_newest_back_test_is_shown_and_of_earlier_ones_what_they_met():
    def told(seed: int, date: str, off: float, **more: Any) -> dict[str, Any]:
        records = [
            {"trace": "t", "variant": variant, "figure": figure, "measured": 1.0, "predicted": 1.0 + off, "off": off,
             "within": None if figure in ("tokens / s", "within SLO") else off < 0.1, "rounds": [1.0], "spread": None,
             "explained": None}
            for variant in ("stock", "ours")
            for figure in fidelity_tables._MEASURES
        ]  # fmt: skip
        provenance = {**PROVENANCE, "seed": seed, "date": date, **more}
        return {"benchmark": "backtest", "provenance": provenance, "results": records}

    early = told(3, "2026-01-01T00:00:00+00:00", 0.05)
    starts = {"server": {"steps": [1.1, 0.95, 1.0], "first_tokens": [1.0]}, "with_lane": {"steps": [0.9, 1.2]}}
    late = told(4, "2026-01-02T00:00:00+00:00", 0.3, slower_than_calibrated=1.07, calibration={"starts": starts})
    text = fidelity_tables.backtest([late, early])
    assert "| t | TTFT P50 | 1,000 | 1,300 | **+30 %** | 1,000 | 1,300 | **+30 %** |" in text
    assert "Within the bars, seed 4: 0 of 6 P50, 0 of 6 P99. A fixed piece of work took 1.07 times" in text
    assert "took, of its costs: steps of stock 0.95 to 1.10, steps of ours 0.90 to 1.20." in text
    assert "Seed 3: 6 of 6 P50, 6 of 6 P99." in text
    assert fidelity_tables.backtest([]) == result_tables.NOTHING


def simulated(measure, off, within, load=None, **more):
    took = {"measured_ms": 100.0, "simulated_ms": 100.0 * (1 + off), "off": off, "within": within}
    return {"variant": "stock", "load": load, "measure": measure, **took, **more}


def test_what_was_simulated_of_an_engine_and_of_a_pipeline_is_apart_and_misses_are_bold():
    engine = result(simulated("TTFT P50", -0.2, False), simulated("TTFT P50", 0.1, True, load=0.5))
    pipeline = result(simulated("ITL P50", 0.02, True, arrivals="all"))
    text = fidelity_tables.simulated([engine, pipeline])
    assert "| ms | stock measured | stock simulated | stock off |" in text
    assert "| TTFT P50 | 100 | 80 | **-20 %** |" in text
    assert "Of the single loads, 1 of 1 values are within the bars." in text
    assert "ITL" not in text
    assert "| ITL P50 | 100 | 102 | +2 % |" in fidelity_tables.simulated([engine, pipeline], pipeline=True)


def test_a_gpu_is_beside_the_simulation_of_the_same_requests():
    text = fidelity_tables.h200(
        result_tables.load(RESULTS, "gpu"), json.loads((RESULTS / "studies" / "h200-mixed.json").read_text())
    )
    assert "| TTFT of images, P50 | 157 | 308 | +96 % | 280 | 238 | -15 % |" in text
    assert "| requests within the SLO | 57.5 % | 48.3 % |  | 100.0 % | 100.0 % |  |" in text


def test_video_says_how_many_times_as_long_the_others_take():
    loads = {"task": "32 frames", "clip": "h264", "median": 1.0, "least": 0.9, "most": 1.1, "cpu_seconds": 2.0}
    loads |= {"samples": 5}
    stock = {**loads, "variant": "stock", "median": 4.0, "most": 5.0, "same_frames_as_stock": True}
    ours = {**loads, "variant": "ours", "same_frames_as_stock": False, "stock_over_it": 4.0, "ffmpeg_over_it": 3.5}
    text = result_tables.video([result(stock, ours, benchmark="video")])
    assert "| 32 frames | h264 | stock | 4 [0.9, 5] |  |  | 2.00 | yes |" in text
    assert "| 32 frames | h264 | ours | 1 [0.9, 1.1] | 4.00 | 3.50 | 2.00 | no |" in text


def test_measures_of_rounds_have_their_least_and_largest_and_some_are_left_out():
    one = {"least": 0.01, "most": 0.5, "samples": 5}
    records = [
        {**one, "measure": measure, "variant": variant, "median": median, "of_stock": of_stock}
        for measure in ("event-loop lag P99", "text TTFT P99")
        for variant, median, of_stock in (("stock", 0.05, 1.0), ("ours", 0.02, 0.1))
    ]
    text = result_tables.by_measure([result(*records)], "seconds", left_out=["text TTFT P99"])
    assert "| seconds, 5 rounds | stock | ours | ours, of stock |" in text
    assert "| event-loop lag P99 | 0.05 [0.01, 0.5] | 0.02 [0.01, 0.5] | 0.10 |" in text
    assert "TTFT" not in text


def test_streams_at_the_client_beside_stock():
    same = {"streams": 4, "same_answers": True, "median": 7.0, "least": 6.0, "most": 9.0, "samples": 5}
    records = [
        {**same, "variant": "stock", "measure": "in bursts %", "arrivals": [0.0, 1.3, 1.35]},
        {**same, "variant": "ours", "measure": "in bursts %", "arrivals": [0.0, 0.005, 0.0125]},
    ]
    text = result_tables.streaming([result(*records)])
    assert "| 4; tokens at the client within 0.1 ms of the one before, % | 7 [6, 9] | 7 [6, 9] |" in text
    assert "| 4; longest ITL of one stream in the round in the middle, ms | 1,300 | 7.5 |" in text
    assert "All variants have the same tokens." in text
    records[1]["same_answers"] = False
    assert "Other tokens than stock's: ours." in result_tables.streaming([result(*records)])


def test_connectors_and_what_is_handed_over_have_their_spread_in_the_order_of_the_columns():
    one = {"median": 0.002, "least": 0.001, "most": 0.003, "samples": 7}
    sizes = [
        {**one, "size": size, "measure": "end to end", "variant": variant, "theirs_over_it": 2.0}
        for size, variant in (("1 KB", "ours"), ("1 KB", "theirs"), ("16 MB", "theirs"), ("16 MB", "ours"))
    ]
    sizes[3]["median"] = 0.004
    text = result_tables.connectors([result(*sizes)])
    assert "| 16 MB, end to end | 4,000 [1,000, 3,000] (×2) | 2,000 [1,000, 3,000] (×2) |" in text
    both = {**one, "mode": "full_payload", "messages": "first", "quantile": "P50"}
    parts = [{**both, "part": part, "variant": "ours"} for part in ("hand-over", "put to got", "floor")]
    text = result_tables.handover([result(*parts, {"variant": "ours", "answers": 4})])
    assert text.count("whole payloads, first message, P50 | 2 [1, 3] |") == 1


def test_stages_tell_ratio_and_bar():
    summary = {"median": 2.0, "iqr": 0.5, "samples": 5}
    stock = {"median": 4.0, "iqr": 0.2}
    full = {"task": "merging", "measure": "latency", "unit": "seconds", "stock": stock, "ours": summary}
    ratio = {"of_stock": 0.5, "of_stock_low": 0.45, "of_stock_high": 0.55}
    count = {**full, "unit": "requests", "stock": summary}
    records = full | ratio | {"bar": 0.6, "met": True}, count | {"bar": 2}, count | {"measure": "of them"}
    text = stage_tables.stages([result(*records)])
    assert "| merging, seconds, 5 rounds | stock | ours | of stock | bar |  |" in text
    assert "| latency | 4 ± 0.1 | 2 ± 0.25 | 0.50 [0.45, 0.55] | 0.6 | met |" in text
    assert "| latency, requests | 2 ± 0.25 | 2 ± 0.25 |  | 2 |  |" in text
    assert "of them" not in text, "a count without a bar"


def test_anomalies_tell_false_alarms_and_how_late_a_fault_is_found():
    one = {"fault": "leak", "healthy_hours": 2.0, "false_alarms": 1, "false_alarms_before_fault": 1}
    records = {**one, "found_after_seconds": 10.0}, {**one, "found_after_seconds": None}
    assert "| leak | 4 | 4 | 1.6 | 1 of 2 | 10 | 10 |" in stage_tables.anomaly([result(*records)])
    quiet = {**one, "healthy_hours": 10.0, "false_alarms": 0, "false_alarms_before_fault": 0}
    assert "| leak | 10 | 0 | 0.3 | 0 of 1 |" in stage_tables.anomaly([result({**quiet, "found_after_seconds": None})])


@pytest.mark.parametrize(("seen", "most"), [(0, 2.996), (1, 4.744), (2, 6.296), (10, 16.962)])
def test_a_rate_is_bounded_by_the_poisson_limit(seen, most):
    assert stage_tables.most_events(seen) == pytest.approx(most, abs=1e-3)


def test_compression_shows_break_even_speeds_and_raw_over_ours_with_its_spread():
    encode = {"median": 0.004, "iqr": 0.001}
    even = {"serial": 75e6, "pipelined": 262e6}
    records = [
        {"measure": "codec", "kind": "ids", "codec": "zstd", "fraction": 0.25, "encode_seconds": encode,
         "decode_seconds": {"median": 0.002}, "break_even_bytes_per_second": even},
        {"measure": "codec", "kind": "noise", "codec": "none shrinks it", "fraction": 1.0},
        *({"measure": way, "kind": "ids", "link": "100 MB/s", "variant": variant, "median": median, **more}
          for way in ("serial", "pipelined")
          for variant, median, more in (
              ("raw", 0.012, {}), ("ours", 0.006, {"raw_over_it": 2.0, "raw_over_it_quartiles": [1.9, 2.2]}))),
    ]  # fmt: skip
    text = connector_tables.compression([result(*records, benchmark="compression")])
    assert "| ids | zstd | 0.25 | 4.00 | 2.00 | 75 | 262 |" in text
    assert "| noise | none shrinks it | 1.00 |  |  |  |  |" in text
    both = "×2.00 (1.90 to 2.20)"
    assert f"| ids | 100 MB/s | {both} | {both} |" in text
    assert connector_tables.compression([]) == result_tables.NOTHING


def test_tiers_shows_times_with_their_spread_and_counts_without():
    records = [
        {"variant": "blocking", "measure": "burst", "median": 1.8, "iqr": 0.2},
        {"variant": "tiers", "measure": "burst", "median": 0.9, "iqr": 0.1, "blocking_over_it": 2.0},
        {"variant": "blocking", "measure": "refused", "median": 0.0, "iqr": 0.0},
        {"variant": "tiers", "measure": "refused", "median": 0.0, "iqr": 0.0},
        {"variant": "blocking", "measure": "bytes on disk", "median": 0.0, "iqr": 0.0},
        {"variant": "tiers", "measure": "bytes on disk", "median": float(64 << 20), "iqr": 0.0},
    ]
    text = connector_tables.tiers([result(*records, benchmark="tiers")])
    assert "| burst, ms | 1,800 (±1e+02) | 900 (±50, ×2) |" in text
    assert "| refused | 0 | 0 |" in text
    assert "| bytes on disk, MB | 0 | 64 |" in text
    assert connector_tables.tiers([]) == result_tables.NOTHING


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


def test_steps_that_cost_more_are_told_as_well() -> None:
    rows = gains.gains({"step_cost": [STEPS]})
    better, worse, unclear = row_of(rows, "vLLM's own decisions")[3:]
    assert better == "one more frame of a session, n = 32,768: 80 → 0.16 ms"
    assert (worse, unclear) == ("", "one more frame of a session, n = 1: 0.1 → 0.12 ms")
    slow = gains.gains(
        {"step_cost": [result(*(cell(kind, 1, t, scenario="decode") for kind, t in (("stock", 1.0), ("ours", 1.2))))]}
    )
    assert row_of(slow, "vLLM's own decisions")[4] == "decode step of a request with items, n = 1: 1,000 → 1,200 ms"


def test_a_session_that_outlives_stock_is_told_where_it_ended() -> None:
    runs = run("stock", 8, {1000: 0.1}), run("ours", 8, {1000: 0.02, 5000: 0.035})
    row = row_of(gains.gains({"realtime": [result(*runs)]}), "8 sessions in an engine, 1 run, no interval")
    assert row[3] == "each frame after 1,000: 100 → 20 ms (after 5,000, where stock was too slow to go on: 35 ms)"


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

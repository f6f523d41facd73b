"""Tables of benchmark results: the number in the cell is the number in the file."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
NAMES = ("result_tables", "stage_tables", "connector_tables", "gains", "fidelity_tables", "simulator_tables")
result_tables, stage_tables, connector_tables, gains, fidelity_tables, simulator_tables = map(
    importlib.import_module, NAMES
)
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


def cell(kind, size, median, scenario="realtime_frame", version="0.32.0", **more):
    unit = "bytes" if scenario == "message_bytes" else "seconds"
    return {
        "scenario": scenario, "kind": kind, "version": version, "size": size, "unit": unit, "median": median, **more
    }  # fmt: skip


STEPS = result(
    cell("stock", 1, 0.0001),
    cell("stock", 32768, 0.0863),
    cell("ours", 1, 0.0001),
    cell("ours", 32768, 0.00012),
    cell("ours", 32768, 4096.0, scenario="message_bytes"),
    cell("stock", 32768, 0.5, version="0.33.0"),
)


def test_step_cost_has_a_line_per_variant_and_a_column_per_size():
    text = result_tables.step_cost([STEPS])
    assert "| vLLM | n = 1 | n = 32,768 |" in text
    assert "| 0.32.0 stock | 0.1 | 86.3 |" in text
    assert "| 0.32.0 ours | 0.1 | 0.12 |" in text
    assert "| 0.33.0 stock |  | 500 |" in text
    assert "| 0.32.0 ours | 4,096 |" in text
    assert "2026-01-02, revision abc, seed 7; A CPU, 2 cores, load average 0.5, 1, 2" in text


def test_the_summary_compares_where_both_were_measured_at_the_largest_size():
    text = result_tables.step_cost_summary([STEPS])
    assert "| vLLM 0.32.0 | n |" in text, "0.33 has no figure of ours"
    assert "| one more frame of a session of n items | 32,768 | V1 | 86.3 ms | 0.12 ms |" in text
    assert "worker message" not in text  # stock was not measured


def test_the_summary_is_of_the_newest_version_and_names_the_runner_where_it_matters():
    def pair(stock, ours, **more):
        return cell("stock", 64, stock, **more), cell("ours", 64, ours, **more)

    old = result(*pair(9.0, 9.0, version="0.33.0"))
    new = result(
        *pair(0.001, 0.002, version="0.9.0"),
        *pair(0.1, 0.02, scenario="abort", version="0.100.0", runner="V1"),
        *pair(0.105, 0.021, scenario="abort", version="0.100.0", runner="V2"),
        *pair(0.1, 0.02, scenario="decode", version="0.100.0", runner="V1"),
        *pair(0.1, 0.03, scenario="decode", version="0.100.0", runner="V2"),
    )
    text = result_tables.step_cost_summary([old, new])
    assert "| vLLM 0.100.0 | n | model runner | stock | OmniScheduler |" in text
    assert "| abort with min(n, 8192) items cached | 64 | V1, V2 | 100 ms | 20 ms |" in text
    assert "| one decode step of a request of n items | 64 | V1 | 100 ms | 20 ms |" in text
    assert "| one decode step of a request of n items | 64 | V2 | 100 ms | 30 ms |" in text
    assert "9" not in text.split("*")[0].replace("8192", "")
    assert "| 0.100.0 ours, runner V2 | 30 |" in result_tables.step_cost([new])
    assert result_tables.step_cost_summary([result(cell("ours", 64, 1.0))]) == result_tables.NOTHING


def run(variant, sessions, costs):
    buckets = [{"frames": f, "seconds_per_frame": {"median": cost}} for f, cost in costs.items()]
    return {"variant": variant, "sessions": sessions, "buckets": buckets}


def test_realtime_shows_the_frames_reached_and_the_median_of_repeats():
    runs = [run("ours", 1, {1000: 0.011, 2000: cost}) for cost in (0.012, 0.014, 0.090)]
    text = result_tables.realtime([result(run("stock", 1, {1000: 0.0197}), *runs, benchmark="realtime")])
    assert "| sessions | 1,000 frames | 2,000 frames |" in text
    assert "| 1 × stock | 19.7 |  |\n| 1 × ours | 11.0 | 14.0 |" in text


def test_realtime_shows_the_newest_version_first():
    runs = [{**run("ours", 1, {1000: 0.01}), "versions": {"vllm": f"0.{minor}.0+cpu"}} for minor in (9, 33)]
    text = result_tables.realtime([result(one, benchmark="realtime") for one in runs])
    assert text.index("| vLLM 0.33.0, sessions |") < text.index("| vLLM 0.9.0, sessions |")


def test_pictures_are_those_of_the_newest_version():
    names = ["r-0.9.0-1x1.png", "r-0.33.0-5000x1.png", "r-0.33.0-3000x1-8.png", "r-0.9.0-9x9.png"]
    assert result_tables.of_newest(names) == names[1:3]
    assert sorted(names[1:3], key=result_tables.load_of)[-1] == names[2]
    assert result_tables.of_newest(["step_cost.png"]) == ["step_cost.png"]
    assert result_tables.of_newest([]) == []


def test_overhead_shows_the_ratio_to_stock():
    records = [
        {"variant": variant, "metric": "tokens / s", "median": median, "ratio_to_stock": ratio, "samples": 40}
        for variant, median, ratio in (("stock", 1234.0, 1.0), ("installed", 1200.0, 0.9721))
    ]
    text = result_tables.overhead([result(*records, benchmark="overhead")])
    assert "|  | stock | installed | installed, of stock |" in text
    assert "| tokens / s | 1234 | 1200 | 0.972 |" in text
    records[1] |= {"ratio_interval": [0.961, 0.9812], "statement": "differs from stock: -3.9% to -1.9%"}
    found = result(*records, benchmark="overhead")
    text = result_tables.overhead([found])
    assert "| tokens / s | 1234 | 1200 | 0.972 [0.961, 0.981] |" in text
    assert "40 rounds of each" in text
    assert "- *installed*: tokens / s differs from stock: -3.9% to -1.9%" in text
    found["provenance"] = PROVENANCE | {"versions": {"vllm": "0.33.0+cpu"}}
    assert "vLLM 0.33.0 (40 rounds in turns): tokens / s: differs" in result_tables.overhead_summary([found])


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
    found = result(lane, {"variant": "lane, 16 SMs", "refused": "no green contexts"}, benchmark="gpu.lanes")
    text = result_tables.gpu_lanes([{**found, "provenance": {**PROVENANCE, "gpu": {"name": "Some GPU"}}}])
    assert "| Some GPU | ITL P50 ms |" in text
    assert "| lane, share 0.5 | 11 (1.10) | 12.5 (1.14) | 61 (0.60) |" in text
    assert "| lane, 16 SMs | no green contexts |  |  |" in text


def test_tensors_on_a_gpu_are_shown_with_bandwidth_ratio_and_order():
    timed = {"size": "1 MB", "measure": "end to end", "median": 0.0002, "gigabytes_per_second": 5.24, "wrong": 0}
    found = result(
        {**timed, "variant": "cuda_ipc", "theirs_over_it": 12.34},
        {**timed, "variant": "arena", "wrong": 3},
        {"variant": "cuda_ipc", "measure": "order", "messages": 10, "early": 10, "wrong": 0},
        {"size": "1 GB", "variant": "arena", "refused": "too little shared memory"},
        {"size": "1 MB", "variant": "SharedMemoryConnector", "refused": "not installed"},
        benchmark="gpu.ipc",
    )
    text = result_tables.gpu_ipc([{**found, "provenance": {**PROVENANCE, "gpu": {"name": "Some GPU"}}}])
    assert "| Some GPU | cuda_ipc | arena |\n" in text
    assert "| 1 MB | 200 (5.24 GB/s, ×12.3) | 200 (5.24 GB/s, 3 wrong) |" in text
    assert "| order | 0 of 10 wrong |  |" in text
    assert "| 1 GB |  | too little shared memory |" in text


@pytest.mark.parametrize(
    "make",
    [
        result_tables.step_cost,
        result_tables.realtime,
        result_tables.overhead,
        result_tables.gpu_ipc,
        result_tables.gpu_lanes,
    ],
)
def test_without_results_the_page_says_so(make):
    assert make([]) == result_tables.NOTHING


def test_load_takes_one_benchmark_by_file_name(tmp_path):
    for name, benchmark in (("b", "realtime"), ("a", "realtime"), ("c", "overhead")):
        body = {**result(benchmark=benchmark), "name": name}
        (tmp_path / f"{name}.json").write_text(json.dumps(body))
    assert [found["name"] for found in result_tables.load(tmp_path, "realtime")] == ["a", "b"]


def test_mixed_has_a_table_per_load_with_ratios_to_the_first_variant():
    records = [
        {"variant": variant, "load": load, "measure": "text ITL P99", "median": median}
        for variant, load, median in (
            ("stock", 0.5, 400.0),
            ("ours", 0.5, 20.0),
            ("stock", 1, 500.0),
            ("ours", 1, 30.0),
        )
    ]
    made = result(*records, benchmark="mixed")
    made["provenance"] = PROVENANCE | {"workload": {"frames": 32, "session": True}}
    text = result_tables.mixed([made])
    assert "**load 0.5**, beside a request of 32 pictures and a realtime session" in text
    assert "| text ITL P99 | 400 | 20 (0.05) |" in text
    assert "| text ITL P99 | 500 | 30 (0.06) |" in text


def test_a_whole_vllm_on_a_gpu_says_where_its_part_was_measured():
    row = {"load": 4.0, "measure": "text ITL P99"}
    parts = [
        {"part": "lanes", "command": "python -m benchmarks.gpu.lanes", "results": [{"variant": "decode alone"}]},
        {
            "part": "vllm",
            "command": "python -m benchmarks.mixed --large",
            "results": [{**row, "variant": "stock", "median": 80.0}, {**row, "variant": "ours", "median": 20.0}],
            "measured": {"revision": "def"},
        },
    ]
    text = result_tables.gpu_vllm([{"benchmark": "gpu", "provenance": PROVENANCE, "results": {"parts": parts}}])
    assert "| text ITL P99 | 80 | 20 (0.25) |" in text
    assert "`python -m benchmarks.mixed --large`" in text
    assert "revision def" in text
    assert "decode alone" not in text


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
    assert "| t | TTFT P50 | 1,000 | 1,300 | **+30 %** | – | 1,000 | 1,300 | **+30 %** | – |" in text
    assert "Within the bars, seed 4: 0 of 6 P50, 0 of 6 P99. A fixed piece of work took 1.07 times" in text
    assert "took, of its costs: steps of stock 0.95 to 1.10, steps of ours 0.90 to 1.20." in text
    assert "- Earlier, seed 3: 6 of 6 P50, 6 of 6 P99." in text
    assert fidelity_tables.backtest([]) == result_tables.NOTHING


def test_warm_up_shows_the_first_and_the_last_request():
    records = [
        {"variant": "ours", "measure": name, "median": median}
        for name, median in (("TTFT ms of request 1", 715.0), ("TTFT ms of request 10", 596.0), ("first / last", 1.2))
    ]
    made = result(*records, benchmark="warm_up")
    made["provenance"] = PROVENANCE | {"workload": {"beside": True}}
    text = result_tables.warm_up([made])
    assert "**after a start beside a text request**" in text
    assert "| ours | 715 | 596 | 1.2 |" in text


def test_video_says_how_many_times_as_long_the_others_take():
    loads = {"task": "32 frames", "clip": "h264", "median": 1.0, "cpu_seconds": 2.0, "peak_over_output": 1.1}
    stock = {**loads, "variant": "stock", "median": 4.0, "same_frames_as_stock": True}
    ours = {**loads, "variant": "ours", "same_frames_as_stock": False, "stock_over_it": 4.0, "ffmpeg_over_it": 3.5}
    text = result_tables.video([result(stock, ours, benchmark="video")])
    assert "| 32 frames | h264 | stock | 4.000 |  |  | 2.00 | yes | 1.10 |" in text
    assert "| 32 frames | h264 | ours | 1.000 | 4.00 | 3.50 | 2.00 | no | 1.10 |" in text


def test_preprocessing_beside_stock_with_one_and_two_servers():
    measure = {"measure": "event-loop lag P99", "same_answers": True}
    records = [
        {**measure, "variant": variant, "median": median, "of_stock": of_stock}
        for variant, median, of_stock in (
            ("stock", 0.05, 1.0),
            ("stock, 2 API servers", 0.04, 0.8),
            ("ours", 0.005, 0.1),
        )
    ]
    text = result_tables.preprocess([result(*records, benchmark="preprocess")])
    assert "| event-loop lag P99 | 0.050 | 0.040 | 0.005 | 0.80 | 0.10 |" in text


def test_streams_at_the_client_beside_stock():
    same = {"streams": 4, "same_answers": True, "of_stock": None}
    records = [
        {**same, "variant": "stock", "measure": "ITL P99 ms", "median": 51.234, "of_stock": 1.0},
        {**same, "variant": "ours", "measure": "ITL P99 ms", "median": 8.06, "of_stock": 0.157},
        {**same, "variant": "stock", "measure": "in bursts %", "median": 0.0, "arrivals": [0.0, 1.3, 1.35]},
        {**same, "variant": "ours", "measure": "in bursts %", "median": 0.0, "arrivals": [0.0, 0.005, 0.0125]},
    ]
    measured = {"provenance": PROVENANCE | {"versions": {"vllm": "0.33.0+cpu"}}, "results": records}
    text = result_tables.streaming([measured])
    assert "| 4 streams, vLLM 0.33.0 | stock | ours |" in text
    assert "| ITL P99 at the client, ms | 51.2 | 8.06 (0.16x) |" in text
    assert "| tokens at the client within 0.1 ms of the one before, % | 0 | 0 |" in text
    assert "| longest ITL of one stream in the round in the middle, ms | 1,300 | 7.5 |" in text
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    assert rows.index("ITL P99 at the client, ms") + 1 == rows.index(
        "longest ITL of one stream in the round in the middle, ms"
    )
    assert "All variants have the same tokens." in text
    records[1]["same_answers"] = False
    assert "Other tokens than stock's: ours." in result_tables.streaming([measured])


def test_the_first_token_after_a_video_and_the_model_of_engines():
    seconds = {"measure": "TTFT P99", "median": 2.0, "same_answers": True}
    served = result({**seconds, "variant": "stock"}, {**seconds, "variant": "ours", "median": 0.8, "of_stock": 0.4})
    assert "| TTFT P99 | 2.000 | 0.800 | 0.40 |" in result_tables.video_server([served])
    engines = [{"task": "all", "gop": 30, "videos": 1, "engines": n, "speedup": float(n)} for n in (1, 7)]
    text = result_tables.video_engines([result(*engines)])
    assert "| task | GOP | videos | 1 | 7 |" in text
    assert "| all | 30 | 1 | 1.00 | 7.00 |" in text


def test_stages_tell_ratio_and_bar():
    summary = {"median": 2.0, "iqr": 0.5}
    stock = {"median": 4.0, "iqr": 0.2}
    full = {"task": "merging", "measure": "latency", "unit": "seconds", "stock": stock, "ours": summary}
    ratio = {"of_stock": 0.5, "of_stock_low": 0.45, "of_stock_high": 0.55}
    records = full | ratio | {"bar": 0.6, "met": True}, {**full, "unit": "requests", "stock": summary}
    text = stage_tables.stages([result(*records)])
    assert "| merging, seconds | stock | ours | of stock | bar |  |" in text
    assert "| latency | 4 ± 0.1 | 2 ± 0.25 | 0.50 [0.45, 0.55] | 0.6 | met |" in text
    assert "| latency, requests | 2 ± 0.25 | 2 ± 0.25 |  |  |  |" in text


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
    both = "12.00 | 6.00 (×2.00, 1.90 to 2.20)"
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


def mixed_result(vllm: str, variant: str, frames: int = 0, **ratios: float) -> dict[str, Any]:
    """Return a result of `benchmarks.mixed` at loads 0.5, where all ratios are 9, and 1."""
    return {
        "provenance": {"versions": {"vllm": f"{vllm}+cpu"}, "workload": {"frames": frames}},
        "results": [
            {"variant": variant, "load": load, "measure": f"{name}, all rounds together", "ratio": ratio}
            for name, value in ratios.items()
            for load, ratio in ((0.5, 9.0), (1.0, value))
        ],
    }


def test_a_gain_is_that_of_the_newest_vllm_at_load_1() -> None:
    results = {
        "mixed": [
            mixed_result("0.33.0", "ours", **{"image TTFT P50": 0.456, "tokens / s": 1.01}),
            mixed_result("0.32.0", "ours", **{"image TTFT P50": 0.2}),
            mixed_result("0.33.0", "ours", frames=32, **{"image TTFT P50": 0.1}),
            mixed_result("0.33.0", "realtime", frames=32, **{"text TTFT P99": 0.5}),
        ]
    }
    lines = gains.gains(results).splitlines()
    assert "at load 1: picture TTFT P50 0.46x; tokens/s 1x" in next(line for line in lines if "`chat`" in line)
    assert "text TTFT P99 0.5x" in next(line for line in lines if "`realtime`" in line)
    assert sum(gains.NOT_MEASURED in line for line in lines) == 3  # exact, video and batch


def test_a_gain_is_the_range_of_all_runs_and_names_what_gets_longer() -> None:
    results = {
        "mixed": [
            mixed_result("0.33.0", "ours", **{"image TTFT P50": 0.48}),
            mixed_result("0.33.0", "ours", **{"image TTFT P50": 0.53}),
            mixed_result("0.32.0", "ours", **{"image TTFT P50": 0.9}),
        ]
    }
    for result, ours in zip(results["mixed"], (10.0, 12.0, 40.0), strict=True):
        result["results"] += [
            {"variant": variant, "load": 1.0, "measure": "text ITL P99", "median": median}
            for variant, median in (("stock", 2.0), ("ours", ours))
        ]
    line = next(line for line in gains.gains(results).splitlines() if "`chat`" in line)
    assert "at load 1, 2 runs: picture TTFT P50 0.48x to 0.53x; in return, text ITL P99 5x to 6x" in line


def test_what_the_encoder_spends_on_items_seen_before() -> None:
    def record(variant: str, embeds: int, seconds: float, restore: float = 0.0) -> dict[str, Any]:
        spent = {"encoded_again_seconds": {"median": seconds}, "restore_seconds": {"median": restore}}
        return {"mix": "catalogue", "cache_embeds": embeds, "variant": variant, **spent}

    records = [record("stock", 1, 100.0), record("worth, measured", 1, 90.0), record("worth + host", 1, 20.0, 5.0)]
    records += [record("stock", 2, 10.0), record("worth, measured", 2, 10.1), record("worth + host", 2, 3.0)]
    line = next(
        line for line in gains.gains({"encoder_cache": [{"results": records}]}).splitlines() if "`batch`" in line
    )
    assert "0.90x to 1.01x of stock; 0.25x to 0.30x with" in line


def served(client: str | None, version: str, *records: dict[str, Any]) -> dict[str, Any]:
    """Return a result of `serve`; ``client`` None: of a file from before clients were named."""
    workload = {"rounds": 5, "seconds": 12.0, **({"client": client} if client else {})}
    told = {**PROVENANCE, "workload": workload, "versions": {"vllm": f"{version}+cpu"}}
    return {"benchmark": "serve", "provenance": told, "results": list(records)}


def both_variants(measure: str, stock: float, ours: float, workload: str = "custom") -> list[dict[str, Any]]:
    of_all = {"workload": workload, "measure": f"{measure}, all rounds together"}
    return [
        {"workload": workload, "measure": "tokens / s", "variant": "stock", "median": 1.0, "samples": 5},
        {**of_all, "variant": "stock", "median": stock},
        {**of_all, "variant": "ours", "median": ours, "ratio": ours / stock, "ratio_interval": [0.1, 0.2]},
    ]


def test_what_clients_measure_is_summed_up_for_the_newest_version_by_client():
    text = result_tables.serve_summary(
        [
            served("aiperf 0.13.0", "0.33.0", *both_variants("tokens / s", 100.0, 110.0)),
            served(
                None, "0.33.0", *both_variants("image TTFT P50", 1500.4, 300.0), *both_variants("text ITL P50", 1, 2)
            ),
            served(None, "0.32.0", *both_variants("image TTFT P50", 77.0, 78.0)),
        ]
    )
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines == [
        "| `vllm bench serve`, vLLM 0.33.0 | stock | ours |",
        "| --- | ---: | ---: |",
        "| custom; requests with images: TTFT P50, ms | 1,500 | 300 (0.20x) |",
        "| `aiperf 0.13.0`, vLLM 0.33.0 | stock | ours |",
        "| --- | ---: | ---: |",
        "| custom; output tokens a second | 100 | 110 (1.10x) |",
    ]
    assert result_tables.serve_summary([]) == result_tables.NOTHING


def test_workloads_with_fewer_rounds_than_others_are_named():
    both = [*both_variants("tokens / s", 1.0, 1.0, "custom"), *both_variants("tokens / s", 1.0, 1.0, "random")]
    assert "*5 rounds of 12 s of arrivals.*" in result_tables.serve([served(None, "0.33.0", *both)])
    both[0]["samples"] = 4
    text = result_tables.serve([served(None, "0.33.0", *both)])
    assert "*Rounds of 12 s of arrivals: 4 of custom, 5 of random.*" in text


def test_all_results_of_clients_are_shown_with_their_intervals():
    text = result_tables.serve([served("aiperf 0.13.0", "0.33.0", *both_variants("tokens / s", 100.0, 110.0))])
    assert "**`aiperf 0.13.0`, custom**" in text
    assert "| tokens / s | 100 | 110 (1.10 [0.10, 0.20]) |" in text

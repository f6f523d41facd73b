"""Tables of what the benchmarks have measured, from the result files they leave. No number here is written by hand."""

import itertools
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
"""One result file: ``{"benchmark", "provenance", "results"}``, times in seconds."""

NOTHING = "No result has been recorded yet.\n"
SCENARIOS = {
    "realtime_frame": "one more frame of a session of n items",
    "many_sessions": "64 sessions of n items, one frame each",
    "one_shot_prefill": "prefill of one prompt of n items, in total",
    "one_chunk": "schedule() of one 64-token chunk, n items pending",
    "decode": "one decode step of a request of n items",
    "abort": "abort with min(n, 8192) items cached",
    "message_bytes": "worker message of a session update",
    "text_decode": "one decode step of n text requests",
    "text_prefill": "prefill of n text prompts",
}


def load(folder: Path, benchmark: str) -> list[Result]:
    """Read the results of one benchmark, by file name; files of other benchmarks are passed over."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [result for result in found if result.get("benchmark") == benchmark]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, numbers to the right from the second column on."""
    align = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, align, *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def plain_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of texts; bars inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def source(result: Result) -> str:
    """Tell in one paragraph where the numbers come from."""
    p = result["provenance"]
    load = ", ".join(f"{value:g}" for value in p["load_average"])
    if "load_average_before" in p:
        load += f" at the end, {p['load_average_before'][0]:g} before"
    return (
        f"\n*`{p['command']}`, {p['date'][:10]}, revision {p['revision']}, seed {p['seed']}; "
        f"{p['cpu']}, {p['cores']} cores, load average {load}; medians.*\n"
    )


def step_cost(results: Sequence[Result]) -> str:
    """Show each scenario: versions and kinds down, n across."""
    parts = []
    for result in results:
        for scenario, title in SCENARIOS.items():
            cells = [cell for cell in result["results"] if cell["scenario"] == scenario]
            if not cells:
                continue
            sizes = sorted({cell["size"] for cell in cells})
            lines: dict[str, dict[int, str]] = {}
            for cell in cells:
                runner = ", runner V2" if _runner(cell) == "V2" else ""
                lines.setdefault(f"{cell['version']} {cell['kind']}{runner}", {})[cell["size"]] = _shown(cell)
            rows = [(name, *(line.get(n, "") for n in sizes)) for name, line in lines.items()]
            unit = "bytes" if scenario == "message_bytes" else "ms"
            parts.append(f"\n**{title}** ({unit})\n\n" + table(("vLLM", *(f"n = {n:,}" for n in sizes)), rows))
        parts.append(source(result))
    return "".join(parts) or NOTHING


def step_cost_summary(results: Sequence[Result]) -> str:
    """Stock and ours of the latest run on the newest version that both were measured on, at each scenario's largest n.

    A scenario has a line for each model runner where they differ by more than a tenth, else one for both.
    """
    both = [
        version
        for result in results
        for version in {cell["version"] for cell in result["results"]}
        if {"stock", "ours"} <= {cell["kind"] for cell in result["results"] if cell["version"] == version}
    ]
    if not both:
        return NOTHING
    version = max(both, key=_numbers)
    for result in sorted(results, key=lambda result: str(result["provenance"]["date"]), reverse=True):
        rows = []
        for scenario, title in SCENARIOS.items():
            cells = [c for c in result["results"] if c["scenario"] == scenario and c["version"] == version]
            size = max((cell["size"] for cell in cells), default=0)
            by_runner: dict[str, dict[str, Any]] = {}
            for cell in cells:
                if cell["size"] == size:
                    by_runner.setdefault(_runner(cell), {})[cell["kind"]] = cell
            pairs = {r: (at["stock"], at["ours"]) for r, at in by_runner.items() if {"stock", "ours"} <= at.keys()}
            if len(pairs) > 1 and _close(pairs["V1"][0], pairs["V2"][0]) and _close(pairs["V1"][1], pairs["V2"][1]):
                pairs = {"V1, V2": pairs["V1"]}
            unit = "bytes" if scenario == "message_bytes" else "ms"
            rows += [
                (title, f"{size:,}", runner, *(f"{_shown(cell)} {unit}" for cell in pair))
                for runner, pair in pairs.items()
            ]
        if rows:
            header = (f"vLLM {version}", "n", "model runner", "stock", "OmniScheduler")
            return table(header, rows) + source(result)
    return NOTHING


def _runner(cell: Mapping[str, Any]) -> str:
    runner: str = cell.get("runner", "V1")
    return runner


def _close(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    low, high = sorted((one["median"], other["median"]))
    return bool(high <= 1.1 * low)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split("."))


def _shown(cell: Mapping[str, Any]) -> str:
    median = cell["median"]
    return f"{median:,.0f}" if cell["unit"] == "bytes" else f"{median * 1e3:,.3g}"


def of_newest(names: Sequence[str]) -> list[str]:
    """Return the names of result files that name the newest vLLM, in order, or all where none names a version."""
    versions = {name: _version_in(name) for name in names}
    newest = max(versions.values(), default=())
    return [name for name in names if versions[name] == newest]


def _version_in(name: str) -> tuple[int, ...]:
    found = re.search(r"-(\d+(?:\.\d+)+)(?=[-.])", name)
    return _numbers(found[1]) if found else ()


def load_of(name: str) -> tuple[int, int]:
    """Return (sessions, frames) of a result file of `realtime`, by its name."""
    found = re.search(r"-(\d+)x([\d-]+)\.", name)
    return (max(map(int, found[2].split("-"))), int(found[1])) if found else (0, 0)


def realtime(results: Sequence[Result], points: Sequence[int] = (1000, 2000, 5000, 10000, 20000, 32000)) -> str:
    """Milliseconds per 80 ms frame when a session has grown to so many frames, median over repeats; newest first."""
    parts = []
    for result in sorted(results, key=lambda r: _numbers(_vllm_of(r)), reverse=True):
        runs: dict[tuple[int, str], dict[int, list[float]]] = {}
        for run in result["results"]:
            line = runs.setdefault((run["sessions"], run["variant"]), {})
            for bucket in run["buckets"]:
                line.setdefault(bucket["frames"], []).append(bucket["seconds_per_frame"]["median"] * 1e3)
        reached = max((frames for line in runs.values() for frames in line), default=0)
        shown = [point for point in points if point <= reached]
        rows = [
            (f"{sessions} × {variant}", *(_at(line, point) for point in shown))
            for (sessions, variant), line in sorted(runs.items(), key=lambda item: (item[0][0], item[0][1] != "stock"))
        ]
        if shown:
            version = _vllm_of(result)
            header = (
                f"vLLM {version}, sessions" if version != "0" else "sessions",
                *(f"{point:,} frames" for point in shown),
            )
            parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


def _vllm_of(result: Result) -> str:
    """Return the measured version, without the local part; "0" where the file does not tell."""
    named = {run.get("versions", {}).get("vllm", "") for run in result["results"]} - {""}
    version: str = max(named, default="0")
    return version.split("+")[0]


def _at(line: Mapping[int, Sequence[float]], frames: int) -> str:
    return f"{statistics.median(line[frames]):.1f}" if frames in line else ""


def overhead(results: Sequence[Result]) -> str:
    """Show text-only serving: medians, the ratio to stock by round with its interval, and the conclusion."""
    parts = []
    for result in results:
        lines: dict[str, dict[str, Mapping[str, Any]]] = {}
        for record in result["results"]:
            lines.setdefault(record["metric"], {})[record["variant"]] = record
        variants = list(dict.fromkeys(record["variant"] for record in result["results"]))
        compared = [variant for variant in variants if variant != "stock"]
        rows = [
            (
                metric,
                *(f"{line[variant]['median']:.4g}" if variant in line else "" for variant in variants),
                *(_interval(line[variant]) if variant in line else "" for variant in compared),
            )
            for metric, line in lines.items()
        ]
        header = ("", *variants, *(f"{variant}, of stock" for variant in compared))
        rounds = {record["samples"] for record in result["results"] if "samples" in record}
        parts.append("\n" + table(header, rows))
        if rounds:
            parts.append(f"\n*{', '.join(map(str, sorted(rounds)))} rounds of each; in brackets 95 % intervals.*\n")
        for variant in compared:
            found = [(metric, line[variant].get("statement")) for metric, line in lines.items() if variant in line]
            if all(text for _, text in found):
                parts.append(f"\n- *{variant}*: " + "; ".join(f"{metric} {text}" for metric, text in found) + "\n")
        parts.append(source(result))
    return "".join(parts) or NOTHING


def overhead_summary(results: Sequence[Result]) -> str:
    """State in a sentence what the installed plugin costs without a flag, by the newest version measured."""
    results = [r for r in results if any(one.get("statement") for one in r["results"])]
    if not results:
        return "What the installed plugin costs text-only serving has not been measured with an interval yet.\n"
    result = max(results, key=lambda r: _numbers(r["provenance"]["versions"]["vllm"]))
    own = [one for one in result["results"] if one["variant"] == "installed"]
    said = "; ".join(f"{one['metric']}: {one['statement']}" for one in own)
    return (
        f"Installed without the flag, against vLLM alone, text-only serving on vLLM "
        f"{result['provenance']['versions']['vllm'].split('+')[0]} ({own[0]['samples']} rounds in turns): {said}.\n"
    )


def _interval(record: Mapping[str, Any]) -> str:
    interval = record.get("ratio_interval")
    return f"{record['ratio_to_stock']:.3f}" + (f" [{interval[0]:.3f}, {interval[1]:.3f}]" if interval else "")


def mixed(results: Sequence[Result]) -> str:
    """Show text beside images: a table per load, a column per variant, with the ratio of medians to the first."""
    parts = []
    for result in results:
        workload = result["provenance"]["workload"]
        extras = [f"a request of {workload['frames']} pictures"] if workload["frames"] else []
        extras += ["a realtime session"] if workload.get("session") else []
        beside = f", beside {' and '.join(extras)}" if extras else ""
        ranks = workload.get("tensor_parallel", 1)
        beside += f", tensor parallelism {ranks}" if ranks > 1 else ""
        for load in dict.fromkeys(record["load"] for record in result["results"]):
            lines: dict[str, dict[str, float]] = {}
            for record in result["results"]:
                if record["load"] == load:
                    lines.setdefault(record["measure"], {})[record["variant"]] = record["median"]
            variants = sorted(dict.fromkeys(r["variant"] for r in result["results"]), key=lambda name: name != "stock")
            rows = [(name, *(_of_first(line, v, variants[0]) for v in variants)) for name, line in lines.items()]
            parts.append(f"\n**load {load:g}**{beside}\n\n" + table(("ms unless said", *variants), rows))
        parts.append(source(result))
    return "".join(parts) or NOTHING


VLLM_CLIENT = "vllm bench serve"
TOGETHER = ", all rounds together"
SERVED = {
    "ITL beside images P99": "text tokens while an image waits: ITL P99, ms",
    "image TTFT P50": "requests with images: TTFT P50, ms",
    "image TTFT P99": "requests with images: TTFT P99, ms",
    "text TTFT P99": "requests without images: TTFT P99, ms",
    "within SLO %": "requests within their SLO, %",
    "tokens / s": "output tokens a second",
}
"""Measures of `benchmarks.serve` -> what the table of the README calls them."""


def client_of(result: Result) -> str:
    """Return the client that has sent the requests of a result of `serve`."""
    return str(result["provenance"]["workload"].get("client", VLLM_CLIENT))


def serve(results: Sequence[Result]) -> str:
    """Show what the clients measure: a table per client and workload, over all rounds, with ratios to stock."""
    parts = []
    for result in _by_client(results):
        variants = list(dict.fromkeys(record["variant"] for record in result["results"]))
        for name in dict.fromkeys(record["workload"] for record in result["results"]):
            lines: dict[str, dict[str, str]] = {}
            for record in result["results"]:
                if record["workload"] == name and (
                    record["measure"].endswith(TOGETHER) or "the tokens of" in record["measure"]
                ):
                    cell = f"{record['median']:,.4g}"
                    if "ratio" in record:
                        low, high = record["ratio_interval"]
                        cell += f" ({record['ratio']:.2f} [{low:.2f}, {high:.2f}])"
                    lines.setdefault(record["measure"].removesuffix(TOGETHER), {})[record["variant"]] = cell
            rows = [(measure, *(line.get(variant, "") for variant in variants)) for measure, line in lines.items()]
            parts.append(f"\n**`{client_of(result)}`, {name}**\n\n" + table(("ms unless said", *variants), rows))
        parts.append(_rounds(result) + source(result))
    return "".join(parts) or NOTHING


def serve_summary(results: Sequence[Result]) -> str:
    """Show what the clients measure on the newest vLLM, over all rounds, with a row per workload and measure."""
    newest = max((_numbers(_served_by(result)) for result in results), default=())
    parts = []
    for result in _by_client(results):
        if _numbers(_served_by(result)) != newest:
            continue
        variants = list(dict.fromkeys(record["variant"] for record in result["results"]))
        rows = []
        for workload in dict.fromkeys(record["workload"] for record in result["results"]):
            for measure, words in SERVED.items():
                line = {
                    record["variant"]: record
                    for record in result["results"]
                    if (record["workload"], record["measure"]) == (workload, measure + TOGETHER)
                }
                if line:
                    rows.append((f"{workload}; {words}", *(_of_stock(line.get(variant)) for variant in variants)))
        header = (f"`{client_of(result)}`, vLLM {_served_by(result)}", *variants)
        parts.append("\n" + table(header, rows) + _rounds(result) + source(result))
    return "".join(parts) or NOTHING


def _rounds(result: Result) -> str:
    """Say how many rounds each workload had: fewer than were asked for if some were left out, or the run was ended."""
    had = {r["workload"]: r["samples"] for r in result["results"] if r["measure"] == "tokens / s"}
    seconds = f"{result['provenance']['workload']['seconds']:g} s of arrivals"
    if len(set(had.values())) == 1:
        return f"\n*{max(had.values())} rounds of {seconds}.*\n"
    each = ", ".join(f"{number} of {name}" for name, number in had.items())
    return f"\n*Rounds of {seconds}: {each}.*\n"


def _by_client(results: Sequence[Result]) -> list[Result]:
    """Return the results in the order of vLLM's versions, vLLM's own client first."""
    return sorted(results, key=lambda one: (_numbers(_served_by(one)), client_of(one) != VLLM_CLIENT))


def _served_by(result: Result) -> str:
    """Return the version of vLLM whose servers were measured."""
    return str(result["provenance"]["versions"].get("vllm", "0")).split("+")[0]


def _of_stock(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return ""
    value = record["median"]
    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return shown + (f" ({record['ratio']:.2f}x)" if "ratio" in record else "")


def _of_first(line: Mapping[str, float], variant: str, first: str) -> str:
    if variant not in line:
        return ""
    ratio = f" ({line[variant] / line[first]:.2f})" if variant != first and line.get(first) else ""
    return f"{line[variant]:,.4g}{ratio}"


def warm_up(results: Sequence[Result]) -> str:
    """TTFT of the first requests after a start, and the first over the last."""
    parts = []
    for result in results:
        lines: dict[str, dict[str, float]] = {}
        for record in result["results"]:
            lines.setdefault(record["variant"], {})[record["measure"]] = record["median"]
        shown = [name for name in next(iter(lines.values())) if name.endswith((" 1", " 2", " 10")) or "/" in name]
        rows = [(variant, *(f"{line[name]:,.3g}" for name in shown)) for variant, line in lines.items()]
        beside = " beside a text request" if result["provenance"]["workload"]["beside"] else ""
        parts.append(f"\n**after a start{beside}**\n\n" + table(("", *shown), rows) + source(result))
    return "".join(parts) or NOTHING


def gpu_lanes(results: Sequence[Result]) -> str:
    """Show an encoder beside decode on a GPU: milliseconds and images/s, with the ratio to running alone."""
    parts = []
    for result in results:
        rows = []
        for record in result["results"]:
            cells = (
                _beside(record, "itl_p50", "seconds", 1e3),
                _beside(record, "itl_p99", "seconds", 1e3),
                _beside(record, "images", "per_second", 1.0),
            )
            rows.append((record["variant"], *(cells if "refused" not in record else (record["refused"], "", ""))))
        gpu = result["provenance"]["gpu"]
        parts.append("\n" + table((gpu["name"], "ITL P50 ms", "ITL P99 ms", "images / s"), rows) + source(result))
    return "".join(parts) or NOTHING


def _beside(record: Mapping[str, Any], key: str, unit: str, factor: float) -> str:
    summary = record.get(f"{key}_{unit}")
    return f"{summary['median'] * factor:.4g} ({record[f'{key}_of_alone']:.2f})" if summary else ""


def gpu_vllm(results: Sequence[Result]) -> str:
    """Show a whole vLLM on a GPU: text beside images, as `mixed`."""
    told = []
    for result in results:
        for part in result["results"]["parts"]:
            if part["part"] == "vllm" and part["results"]:
                measured = part.get("measured", {})  # where a part was measured apart from the others
                about = {**result["provenance"], "command": part["command"], "workload": {"frames": 0}, **measured}
                told.append({**result, "provenance": about, "results": part["results"]})
    return mixed(told)


def gpu_ipc(results: Sequence[Result]) -> str:
    """Show a tensor between two processes on a GPU: microseconds at P50, GB/s, and the ratio to vLLM-Omni's.

    What could not be measured at any size is left out.
    """
    parts = []
    for result in results:
        lines: dict[str, dict[str, str]] = {}
        for record in result["results"]:
            line = lines.setdefault(record.get("size", "order"), {})
            if record.get("measure") == "end to end":
                ratio = f", ×{record['theirs_over_it']:.3g}" if "theirs_over_it" in record else ""
                wrong = f", {record['wrong']} wrong" if record["wrong"] else ""
                shown = f"{record['median'] * 1e6:,.4g} ({record['gigabytes_per_second']:.3g} GB/s{ratio}{wrong})"
                line[record["variant"]] = shown
            elif record.get("measure") == "order":
                line[record["variant"]] = f"{record['wrong']} of {record['messages']} wrong"
            elif "refused" in record:
                line[record["variant"]] = record["refused"]
        measured = (record["variant"] for record in result["results"] if "refused" not in record)
        variants = list(dict.fromkeys(measured))
        rows = [(size, *(line.get(variant, "") for variant in variants)) for size, line in lines.items()]
        gpu = result["provenance"]["gpu"]
        parts.append("\n" + table((gpu["name"], *variants), rows) + source(result))
    return "".join(parts) or NOTHING


def connectors(results: Sequence[Result]) -> str:
    """Show one message between two processes: a row per size and measure, a column per connector."""
    parts = []
    for result in results:
        lines: dict[tuple[str, str], dict[str, str]] = {}
        for record in result["results"]:
            value = record["median"] * (1 if record["measure"] == "memory held per byte" else 1e6)
            ratio = f" (×{record['theirs_over_it']:.3g})" if "theirs_over_it" in record else ""
            lines.setdefault((record["size"], record["measure"]), {})[record["variant"]] = f"{value:,.4g}{ratio}"
        variants = list(dict.fromkeys(record["variant"] for record in result["results"]))
        rows = [(*key, *(line.get(variant, "") for variant in variants)) for key, line in lines.items()]
        parts.append("\n" + table(("payload", "µs unless said", *variants), rows) + source(result))
    return "".join(parts) or NOTHING


def video(results: Sequence[Result]) -> str:
    """Loads of videos: a row per task and loader."""
    parts = []
    for result in results:
        rows = []
        for record in result["results"]:
            ratios = [f"{record[f'{other}_over_it']:.2f}" if f"{other}_over_it" in record else "" for other in _OTHERS]
            memory = record["peak_over_output"]
            same = "yes" if record["same_frames_as_stock"] else "no"
            seconds, cpu = f"{record['median']:.3f}", f"{record['cpu_seconds']:.2f}"
            cells = (record["task"], record["clip"], record["variant"], seconds, *ratios, cpu, same)
            rows.append((*cells, f"{memory:.2f}" if memory is not None else ""))
        parts.append("\n" + table(_VIDEO_HEADER, rows) + source(result))
    return "".join(parts) or NOTHING


_OTHERS = ("stock", "ffmpeg")
_VIDEO_HEADER = ("task", "clip", "loader", "seconds", "× stock", "× FFmpeg", "CPU s", "same frames", "memory / output")


def video_server(results: Sequence[Result]) -> str:
    """Show the first token after a video: a row per measure."""
    parts = []
    for result in results:
        lines: dict[str, dict[str, Mapping[str, Any]]] = {}
        for record in result["results"]:
            lines.setdefault(record["measure"], {})[record["variant"]] = record
        rows = [
            (measure, *(f"{line[v]['median']:.3f}" for v in ("stock", "ours")), f"{line['ours']['of_stock']:.2f}")
            for measure, line in lines.items()
        ]
        parts.append("\n" + table(("seconds", "stock", "ours", "of stock"), rows) + source(result))
    return "".join(parts) or NOTHING


def preprocess(results: Sequence[Result]) -> str:
    """Show requests with pictures that arrive together, and text beside them: a row per measure."""
    parts = []
    for result in results:
        lines: dict[str, dict[str, Mapping[str, Any]]] = {}
        for record in result["results"]:
            lines.setdefault(record["measure"], {})[record["variant"]] = record
        variants = list(next(iter(lines.values())))
        rows = [
            (
                measure,
                *(f"{line[v]['median']:.3f}" for v in variants),
                *(f"{line[v]['of_stock']:.2f}" for v in variants if v != "stock"),
            )
            for measure, line in lines.items()
        ]
        header = ("seconds", *variants, *(f"{v}, × stock" for v in variants if v != "stock"))
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


STREAMING = {
    "in bursts %": "tokens at the client within 0.1 ms of the one before, %",
    "ITL P99 ms": "ITL P99 at the client, ms",
    "sent: in bursts %": "tokens sent within 0.1 ms of the one before, %",
    "sent: ITL P99 ms": "ITL P99 where the API server sends, ms",
    "step ms": "time between tokens in the engine core, ms",
    "TTFT P50 ms": "TTFT P50, ms",
    "tokens / s": "tokens a second",
    "CPU ms / token, engine core": "processor time of the engine core, ms a token",
    "ready ms / token, API server": "API server ready without a core, ms a token",
    "ready ms / token, client": "client ready without a core, ms a token",
}
"""Maps measures of `benchmarks.streaming` to their rows."""


def streaming(results: Sequence[Result]) -> str:
    """Show when tokens leave a server and reach a client: a table for each number of streams, with ratios to stock."""
    parts = []
    for result in results:
        records = result["results"]
        variants = list(dict.fromkeys(record["variant"] for record in records))
        for streams in dict.fromkeys(record["streams"] for record in records):
            lines: dict[str, dict[str, Mapping[str, Any]]] = {}
            longest = {}
            for record in (record for record in records if record["streams"] == streams):
                compared = record["variant"] != "stock" and record["of_stock"] is not None
                ratio = {"ratio": record["of_stock"]} if compared else {}
                lines.setdefault(record["measure"], {})[record["variant"]] = record | ratio
                if at := record.get("arrivals"):
                    longest[record["variant"]] = max(after - before for before, after in itertools.pairwise(at))
            rows = []
            for measure, row in STREAMING.items():
                if measure in lines:
                    rows.append((row, *(_of_stock(lines[measure][variant]) for variant in variants)))
                if measure == "ITL P99 ms" and longest:
                    times = (_of_stock({"median": 1e3 * longest[variant]}) for variant in variants)
                    rows.append(("longest ITL of one stream in the round in the middle, ms", *times))
            title = f"{streams} stream{'s' if streams > 1 else ''}, vLLM {_served_by(result)}"
            parts.append("\n" + table((title, *variants), rows))
        unlike = [v for v in variants if not all(r["same_answers"] for r in records if r["variant"] == v)]
        said = f"Other tokens than stock's: {', '.join(unlike)}." if unlike else "All variants have the same tokens."
        parts.append(f"\n{said}\n{source(result)}")
    return "".join(parts) or NOTHING


def video_engines(results: Sequence[Result]) -> str:
    """Show how many times as fast as one engine many are, by the model."""
    parts = []
    for result in results:
        lines: dict[tuple[str, str, str], dict[int, str]] = {}
        for record in result["results"]:
            key = (record["task"], str(record["gop"]), str(record["videos"]))
            lines.setdefault(key, {})[record["engines"]] = f"{record['speedup']:.2f}"
        engines = sorted({record["engines"] for record in result["results"]})
        rows = [(*key, *(line[count] for count in engines)) for key, line in lines.items()]
        parts.append("\n" + table(("task", "GOP", "videos", *map(str, engines)), rows) + source(result))
    return "".join(parts) or NOTHING

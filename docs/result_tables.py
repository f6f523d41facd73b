"""Tables of what the benchmarks have measured, from the result files they leave. No number here is written by hand."""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Result = Mapping[str, Any]
"""One result file: ``{"benchmark", "provenance", "results"}``, times in seconds."""

NOTHING = "No result has been recorded yet.\n"
TOGETHER = ", all rounds together"
FEWEST_OF_P99 = 100
"""A P99 of fewer values is one of the largest: it is not shown."""
SCENARIOS = {
    "realtime_frame": "one more frame of a session of n items",
    "many_sessions": "64 sessions of n items, one frame each",
    "one_shot_prefill": "prefill of one prompt of n items, in total",
    "one_chunk": "`schedule()` of one 64-token chunk, n items pending",
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


def parts_of_gpu(results: Iterable[Result], name: str) -> list[Result]:
    """Return a part of `benchmarks.gpu` from each of its results, as a result of its own."""
    return [
        {"provenance": {**result["provenance"], "command": part["command"], **part.get("measured", {})}, **part}
        for result in results
        for part in result["results"]["parts"]
        if part["part"] == name and part["results"]
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, numbers to the right from the second column on."""
    align = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, align, *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def plain_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table of texts; bars inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def default_or_kind(default: str, values: str) -> str:
    """Return a default with the other values that may be named, or the kind of value where there is no default."""
    if not default:
        return values
    others = [value for value in values.split(", ") if value != default]
    return f"{default}, or {', '.join(others)}" if values.startswith("`") and others else default


def short(command: str) -> str:
    """Return a command without the options that no number depends on."""
    return re.sub(r" --(?:jobs \d+|plots|quiet|out \S+)", "", command)


def source(result: Result) -> str:
    """Tell in one paragraph where the numbers come from."""
    p = result["provenance"]
    named = {**p.get("versions", {}), **_versions_of_runs(result)}
    versions = [f"{name} {named[key].split('+')[0]}" for key, name in _NAMED.items() if key in named]
    about = ["simulated"] if p.get("simulated") else [*versions, hardware(result), _loads(p)]
    return f"\n*`{short(p['command'])}`, {p['date'][:10]}, revision {p['revision']}; {', '.join(about)}; medians.*\n"


_NAMED = {"vllm": "vLLM", "vllm-omni": "vLLM-Omni"}


def _loads(p: Mapping[str, Any]) -> str:
    before = f"{p['load_average_before'][0]:g} before, " if "load_average_before" in p else ""
    return f"load average {before}{p['load_average'][0]:g} at the end"


def hardware(result: Result) -> str:
    """Name the GPU, or else the processor and its cores."""
    p = result["provenance"]
    return f"one {p['gpu']['name']}" if "gpu" in p else f"{p['cores']} cores of {p['cpu']}"


def vllm_of(result: Result) -> str:
    """Return the measured version of vLLM, without its local part; "0" where the file does not tell."""
    named = {**result["provenance"].get("versions", {}), **_versions_of_runs(result)}
    return str(named.get("vllm", "0")).split("+")[0]


def _versions_of_runs(result: Result) -> Mapping[str, str]:
    runs = result["results"]
    return runs[0].get("versions", {}) if isinstance(runs, list) and runs else {}


def numbers(version: str) -> tuple[int, ...]:
    """Return the parts of a version, to be compared."""
    return tuple(int(part) for part in version.split("+")[0].split("."))


def of_newest(names: Sequence[str]) -> list[str]:
    """Return the names of result files that name the newest vLLM, in order, or all where none names a version."""
    versions = {name: _version_in(name) for name in names}
    newest = max(versions.values(), default=())
    return [name for name in names if versions[name] == newest]


def _version_in(name: str) -> tuple[int, ...]:
    found = re.search(r"-(\d+(?:\.\d+)+)(?=[-.])", name)
    return numbers(found[1]) if found else ()


def load_of(name: str) -> tuple[int, int]:
    """Return (sessions, frames) of a result file of `realtime`, by its name."""
    found = re.search(r"-(\d+)x([\d-]+)\.", name)
    return (max(map(int, found[2].split("-"))), int(found[1])) if found else (0, 0)


def written(value: float) -> str:
    """Write a number with three digits."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def lines_of(records: Iterable[Mapping[str, Any]], *keys: str) -> dict[Any, dict[str, Mapping[str, Any]]]:
    """Group records by the values of keys, and within a group by variant."""
    found: dict[Any, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        key = tuple(record[key] for key in keys)
        found.setdefault(key if len(keys) > 1 else key[0], {})[record["variant"]] = record
    return found


# ---- the scheduler's own time


def step_cost(results: Sequence[Result]) -> str:
    """Show each scenario at its least and its largest size, on model runner V2, with the ratios of the rounds."""
    parts = []
    for result in results:
        rows = []
        for scenario, title in SCENARIOS.items():
            for size, stock, ours in pairs(result, scenario):
                low, high = ratios(stock, ours)
                cells = (f"{size:,}", _in_unit(stock), _in_unit(ours), f"{_digits(low)} to {_digits(high)}")
                rows.append((title, *cells))
        if rows:
            header = (f"vLLM {max((r['version'] for r in result['results']), key=numbers)}, model runner V2", "n")
            parts.append("\n" + table((*header, "stock", "ours", "of stock, by round"), rows) + source(result))
    return "".join(parts) or NOTHING


def pairs(result: Result, scenario: str) -> list[tuple[int, Mapping[str, Any], Mapping[str, Any]]]:
    """Return (size, stock, ours) of the least and the largest size of a scenario, on model runner V2."""
    cells: dict[int, dict[str, Mapping[str, Any]]] = {}
    for cell in result["results"]:
        if cell["scenario"] == scenario and cell.get("runner", "V1") == "V2":
            cells.setdefault(cell["size"], {})[cell["kind"]] = cell
    both = {size: of for size, of in sorted(cells.items()) if {"stock", "ours"} <= of.keys()}
    ends = sorted({min(both), max(both)}) if both else []
    return [(size, both[size]["stock"], both[size]["ours"]) for size in ends]


def ratios(stock: Mapping[str, Any], ours: Mapping[str, Any]) -> tuple[float, float]:
    """Return the least and the largest ratio of a round."""
    found = [mine / base for mine, base in zip(ours["rounds"], stock["rounds"], strict=False)]
    return min(found), max(found)


def _in_unit(cell: Mapping[str, Any]) -> str:
    if cell["unit"] == "bytes":
        return f"{cell['median']:,.0f} bytes"
    return f"{written(cell['median'] * 1e3)} ms" if cell["median"] >= 1e-3 else f"{written(cell['median'] * 1e6)} µs"


POINTS = (250, 1000, 2000, 4000, 5000)


def realtime(results: Sequence[Result]) -> str:
    """Show the milliseconds per 80 ms frame when each session has grown to so many frames, medians of one run."""
    rows = []
    for result in results:
        for run in result["results"]:
            line = {bucket["frames"]: bucket["seconds_per_frame"]["median"] * 1e3 for bucket in run["buckets"]}
            shown = (written(line[point]) if point in line else "" for point in POINTS)
            rows.append((f"{run['sessions']} × {run['variant']}", *shown))
    header = ("sessions", *(f"{point:,} frames" for point in POINTS))
    return table(header, rows) + "".join(map(source, results)) if rows else NOTHING


# ---- text beside images


ALL_CORES = "stock on all cores"
SESSION = "a realtime session"


class Run(NamedTuple):
    """What `benchmarks.mixed` has measured at one load."""

    result: Result
    load: float
    measures: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """By measure and variant."""

    @property
    def shared(self) -> bool:
        """Return whether the encoder beside the LLM takes compute that stock's LLM has."""
        return "gpu" in self.result["provenance"] or self._workload.get("tensor_parallel", 1) > 1

    @property
    def beside(self) -> str:
        """Name what runs beside the usual requests."""
        extras = [f"a request of {self._workload['frames']} pictures"] if self._workload.get("frames") else []
        return " and ".join(extras + [SESSION] * bool(self._workload.get("session")))

    @property
    def where(self) -> str:
        """Name the hardware, and whether compute is shared."""
        ranks = self._workload.get("tensor_parallel", 1)
        of_ranks = f", {ranks} tensor-parallel ranks" if ranks > 1 else ""
        idle = "stock has all cores" if self.stock == ALL_CORES else "a core that stock leaves idle"
        return f"{hardware(self.result)}{of_ranks}: " + ("shared" if self.shared else idle)

    @property
    def stock(self) -> str:
        """Name the variant that ours is compared with, the first of the run."""
        return next(iter(self.measures["tokens / s"]))

    @property
    def ours(self) -> str:
        """Name the variant of ours: `ours` is the profile `chat`, others are named after their profile."""
        return next(name for name in ("ours", "realtime") if name in self.measures["tokens / s"])

    @property
    def rounds(self) -> int:
        return max(record["samples"] for record in self.measures["tokens / s"].values())

    @property
    def _workload(self) -> Mapping[str, Any]:
        return self.result["provenance"].get("workload", {})


def runs(mixed: Iterable[Result], gpu: Iterable[Result] = ()) -> list[Run]:
    """Return the runs of `mixed`, one for each load, and those on a GPU."""
    found = []
    for result in (*mixed, *parts_of_gpu(gpu, "vllm")):
        for load in dict.fromkeys(record["load"] for record in result["results"]):
            records = [record for record in result["results"] if record["load"] == load]
            found.append(Run(result, load, lines_of(records, "measure")))
    return found


MIXED = (
    "image TTFT P50",
    "image TTFT P99",
    "ITL beside images P99",
    "text ITL P99",
    "text TTFT P99",
    "within SLO %",
)


def mixed(results: Sequence[Result], gpu: Sequence[Result] = ()) -> str:
    """Show text beside images: a row for each run and load, with the ratio to stock."""
    rows = []
    for run in sorted(runs(results, gpu), key=lambda one: (one.shared, one.where, one.beside, one.load)):
        about = f"{run.where}; load {run.load:g}" + (f"; beside {run.beside}" if run.beside else "")
        asked = run.measures.get("image TTFT P50" + TOGETHER, {}).get(run.ours, {}).get("samples", "–")
        rows.append((about, f"{run.rounds}; {asked}", *(_compared(run, measure) for measure in MIXED)))
    of_gpu = parts_of_gpu(gpu, "vllm")
    header = ("stock → ours, ms unless said", "rounds; requests with images", *MIXED)
    return table(header, rows) + "".join(map(source, (*results, *of_gpu))) if rows else NOTHING


def compared(run: Run, measure: str) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """Return a measure of stock and of ours: of all rounds together where there is one, else by round.

    None where there is neither, or a P99 of fewer than 100 values. A round has too few requests for a P99 of TTFT.
    """
    for name in (measure + TOGETHER, *([measure] if "TTFT P99" not in measure else [])):
        of = run.measures.get(name, {})
        if {run.stock, run.ours} <= of.keys():
            stock, own = of[run.stock], of[run.ours]
            few = name.endswith(TOGETHER) and min(stock["samples"], own["samples"]) < FEWEST_OF_P99
            return None if few and "P99" in measure else (stock, own)
    return None


def _compared(run: Run, measure: str) -> str:
    both = compared(run, measure)
    if both is None:
        return "–"
    stock, own = both
    return f"{written(stock['median'])} → {written(own['median'])}, {ratio(stock, own, run.rounds)}"


def ratio(stock: Mapping[str, Any], own: Mapping[str, Any], rounds: int) -> str:
    """Write the ratio to stock, with its 95 % interval where there are several rounds and it was computed."""
    if not stock["median"]:
        return "–"
    value = f"{_digits(own.get('ratio', own['median'] / stock['median']))}x"
    if "ratio_interval" not in own or rounds < 2:
        return value
    low, high = map(_digits, own["ratio_interval"])
    return f"{value} [{low}, {high}]"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value >= 0.095 else f"{value:.2g}"


# ---- real servers


def serve(results: Sequence[Result]) -> str:
    """Show what the clients measure over all rounds: a row for each workload and measure, with ratios to stock."""
    parts = []
    for result in results:
        records = [r for r in result["results"] if r["measure"].endswith(TOGETHER)]
        variants = list(dict.fromkeys(record["variant"] for record in records))
        rounds = max(r["samples"] for r in records if r["measure"].startswith("tokens / s"))
        rows = []
        for (workload, measure), line in lines_of(records, "workload", "measure").items():
            name = measure.removesuffix(TOGETHER)
            values = min(one["samples"] for one in line.values())
            if not name.startswith("tokens / s") and not ("P99" in name and values < FEWEST_OF_P99):
                cells = (_of_stock(line.get("stock"), line.get(variant), rounds) for variant in variants)
                rows.append((f"{workload}; {name}", str(values), *cells))
        client = result["provenance"]["workload"].get("client", "vllm bench serve")
        seconds = result["provenance"]["workload"]["seconds"]
        header = (f"`{client}`, {rounds} rounds of {seconds:g} s; ms unless said", "n", *variants)
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


def _of_stock(stock: Mapping[str, Any] | None, own: Mapping[str, Any] | None, rounds: int) -> str:
    if stock is None or own is None:
        return ""
    return written(own["median"]) + ("" if own is stock else f", {ratio(stock, own, rounds)}")


def spread_of(record: Mapping[str, Any], factor: float = 1.0) -> str:
    """Write a median with its least and largest value."""
    low, high = (record["least"], record["most"]) if "least" in record else (record["best"], record["worst"])
    return f"{written(record['median'] * factor)} [{written(low * factor)}, {written(high * factor)}]"


def by_measure(results: Sequence[Result], unit: str, factor: float = 1.0, left_out: Sequence[str] = ()) -> str:
    """Show a row for each measure: medians with their least and largest of the rounds, and ratios to stock."""
    parts = []
    for result in results:
        lines = lines_of((r for r in result["results"] if r["measure"] not in left_out), "measure")
        variants = list(dict.fromkeys(record["variant"] for record in result["results"]))
        compared = [variant for variant in variants if variant != "stock"]
        rows = [
            (
                measure,
                *(spread_of(line[variant], factor) for variant in variants),
                *(f"{line[variant]['of_stock']:.2f}" for variant in compared),
            )
            for measure, line in lines.items()
        ]
        rounds = result["results"][0]["samples"]
        header = (f"{unit}, {rounds} rounds", *variants, *(f"{variant}, of stock" for variant in compared))
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


STREAMING = {
    "in bursts %": "tokens at the client within 0.1 ms of the one before, %",
    "step ms": "time between tokens in the engine core, ms",
    "CPU ms / token, engine core": "processor time of the engine core, ms a token",
}
"""Maps measures of `benchmarks.streaming` to their rows."""


def streaming(results: Sequence[Result]) -> str:
    """Show when tokens leave a server and reach a client, with the most streams: a row for each measure."""
    parts = []
    for result in results:
        most = max(record["streams"] for record in result["results"])
        records = [record for record in result["results"] if record["streams"] == most]
        variants = list(dict.fromkeys(record["variant"] for record in records))
        rows = []
        for measure, line in lines_of(records, "measure").items():
            if at := {variant: line[variant]["arrivals"] for variant in variants if line[variant].get("arrivals")}:
                longest = (written(1e3 * max(b - a for a, b in itertools.pairwise(at[v]))) for v in variants)
                rows.append(("longest ITL of one stream in the round in the middle, ms", *longest))
            if measure in STREAMING:
                rows.append((STREAMING[measure], *(spread_of(line[variant]) for variant in variants)))
        header = (f"{most} streams; median of {records[0]['samples']} rounds [least, largest]", *variants)
        unlike = [v for v in variants if not all(r["same_answers"] for r in records if r["variant"] == v)]
        said = f"Other tokens than stock's: {', '.join(unlike)}." if unlike else "All variants have the same tokens."
        share = result["provenance"].get("workload", {}).get("largest share of other processes, in cores", 0.0)
        said += f" Other processes had up to {written(share)} of a core in a measurement that counts."
        parts.append("\n" + table(header, rows) + f"\n{said}\n{source(result)}")
    return "".join(parts) or NOTHING


def video(results: Sequence[Result]) -> str:
    """Show loads of videos: a row for each task and loader."""
    parts = []
    for result in results:
        rows = []
        for record in result["results"]:
            over = [f"{record[f'{other}_over_it']:.2f}" if f"{other}_over_it" in record else "" for other in _OTHERS]
            same = "yes" if record["same_frames_as_stock"] else "no"
            cells = (record["task"], record["clip"], record["variant"], spread_of(record), *over)
            rows.append((*cells, f"{record['cpu_seconds']:.2f}", same))
        rounds = result["results"][0]["samples"]
        header = (f"{rounds} rounds", "clip", "loader", "seconds", "× stock", "× FFmpeg", "CPU s", "same frames")
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


_OTHERS = ("stock", "ffmpeg")


# ---- connectors


def connectors(results: Sequence[Result]) -> str:
    """Show one message between two processes: a row per size, a column per connector."""
    parts = []
    for result in results:
        rows = []
        variants = list(dict.fromkeys(record["variant"] for record in result["results"]))
        for (size, measure), line in lines_of(result["results"], "size", "measure").items():
            if measure in ("end to end", "P99"):
                rows.append((f"{size}, {measure}", *(_of_theirs(line[variant]) for variant in variants)))
        rounds = result["results"][0]["samples"]
        parts.append("\n" + table((f"µs, {rounds} rounds", *variants), rows) + source(result))
    return "".join(parts) or NOTHING


def _of_theirs(record: Mapping[str, Any]) -> str:
    over = f" (×{record['theirs_over_it']:.3g})" if "theirs_over_it" in record else ""
    return spread_of(record, 1e6) + over


_MODES = {"full_payload": "whole payloads", "async_chunk": "async-chunk"}


def handover(results: Sequence[Result]) -> str:
    """Show messages between the stages of a pipeline that runs: a row for each mode and quantile."""
    parts = []
    for result in results:
        records = [r for r in result["results"] if r.get("part") == "put to got"]
        rows = [
            (
                f"{_MODES[mode]}, {messages} message, {at}",
                *(spread_of(record, 1e3) for record in line.values()),
            )
            for (mode, messages, at), line in sorted(
                lines_of(records, "mode", "messages", "quantile").items(),
                key=lambda item: item[0],
                reverse=True,
            )
        ]
        variants = list(dict.fromkeys(record["variant"] for record in records))
        header = (f"ms, {records[0]['samples']} rounds", *variants)
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


# ---- on a GPU


def gpu_lanes(results: Sequence[Result]) -> str:
    """Show an encoder beside decode on a GPU: milliseconds and images/s, with the ratio to running alone.

    Left out are streams that no lane controls, and ways to start decode first, which changed next to nothing.
    """
    parts = []
    for result in parts_of_gpu(results, "lanes"):
        rows = []
        for record in result["results"]:
            if "decode prior" in record["variant"] or record["variant"].startswith("side stream"):
                continue
            cells = (
                _beside(record, "itl_p50", "seconds", 1e3),
                _beside(record, "itl_p99", "seconds", 1e3),
                _beside(record, "images", "per_second", 1.0),
            )
            rows.append((record["variant"], *(cells if "refused" not in record else (record["refused"], "", ""))))
        header = (result["provenance"]["gpu"]["name"], "ITL P50 ms", "ITL P99 ms", "images / s")
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


def _beside(record: Mapping[str, Any], key: str, unit: str, factor: float) -> str:
    summary = record.get(f"{key}_{unit}")
    return f"{written(summary['median'] * factor)} ({record[f'{key}_of_alone']:.2f})" if summary else ""


def gpu_ipc(results: Sequence[Result]) -> str:
    """Show a tensor between two processes on a GPU: microseconds at P50, and what arrived wrong."""
    parts = []
    for result in parts_of_gpu(results, "ipc"):
        found = [r for r in result["results"] if r.get("measure") in ("end to end", "order")]
        lines = lines_of(({**r, "size": r.get("size", "order")} for r in found), "size")
        variants = list(dict.fromkeys(record["variant"] for record in found))
        rows = [
            (size, *(_of_ipc(line[variant]) if variant in line else "" for variant in variants))
            for size, line in lines.items()
        ]
        header = (f"{result['provenance']['gpu']['name']}, µs", *variants)
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


def _of_ipc(record: Mapping[str, Any]) -> str:
    if record["measure"] == "order":
        return f"{record['wrong']} of {record['messages']} wrong"
    wrong = f", {record['wrong']} wrong" if record["wrong"] else ""
    return f"{written(record['median'] * 1e6)} ({record['gigabytes_per_second']:.3g} GB/s{wrong})"

"""Tables of the page on fidelity: the back-test, what was simulated beside it, and forecasts of recorded arrivals."""

from collections.abc import Mapping, Sequence
from typing import Any

from result_tables import NOTHING, Result, lines_of, parts_of_gpu, source, table, written

_MEASURES = (
    "TTFT P50",
    "TTFT P99",
    "ITL P50",
    "ITL P99",
    "end to end P50",
    "end to end P99",
    "within SLO",
)


def backtest(results: Sequence[Result]) -> str:
    """Show the error of each figure of the newest result, by trace; misses in bold. Of the others, what they met."""
    if not results:
        return NOTHING
    *others, newest = sorted(results, key=lambda result: str(result["provenance"]["date"]))
    records = {(r["trace"], r["figure"], r["variant"]): r for r in newest["results"]}
    traces = dict.fromkeys(r["trace"] for r in newest["results"])
    variants = list(dict.fromkeys(r["variant"] for r in newest["results"]))
    rows = [
        (measure, *(_off(records[trace, measure, variant]) for trace in traces for variant in variants))
        for measure in _MEASURES
    ]
    header = ("error", *(f"{trace}, {variant}" for trace in traces for variant in variants))
    barred = [r for r in newest["results"] if r["within"] is not None]
    explained = sum(not r["within"] and bool(r["explained"]) for r in barred)
    beyond = (
        f"Of the others, {explained} are off by less than the repetitions are apart."
        if all(len(r["rounds"]) > 1 for r in barred)
        else "Each trace was replayed once, so how far repetitions are apart is not known."
    )
    earlier = "".join(f"Seed {other['provenance']['seed']}: {_met(other)}\n{source(other)}\n" for other in others)
    said = f"\nWithin the bars, seed {newest['provenance']['seed']}: {_met(newest)} {beyond}\n"
    return "\n" + table(header, rows) + said + source(newest) + "\n" + earlier


def _met(result: Result) -> str:
    barred = [r for r in result["results"] if r["within"] is not None]
    met = {part: [r["within"] for r in barred if r["figure"].endswith(part)] for part in ("P50", "P99")}
    slower = result["provenance"].get("slower_than_calibrated")
    pace = "" if slower is None else f" A fixed piece of work took {slower:.2f} times as long as at the calibration."
    return ", ".join(f"{sum(own)} of {len(own)} {part}" for part, own in met.items()) + "." + pace


def _off(record: Mapping[str, Any]) -> str:
    off = f"{100 * record['off']:+.0f} %"
    return f"**{off}**" if record["within"] is False else off


def simulated(results: Sequence[Result]) -> str:
    """Show what the pipeline was measured and simulated to take, all loads together; misses in bold."""
    parts = []
    for result in results:
        together = [r for r in result["results"] if r["load"] is None and r["arrivals"] == "all"]
        variants = list(dict.fromkeys(record["variant"] for record in together))
        rows = [
            (measure, *(cell for variant in variants for cell in _of_simulated(line[variant])))
            for measure, line in lines_of(together, "measure").items()
        ]
        header = ("ms", *(f"{v} {name}" for v in variants for name in ("measured", "simulated", "off")))
        judged = [record["within"] for record in result["results"] if "within" in record and record not in together]
        met = f"\nOf the single loads, {sum(judged)} of {len(judged)} values are within the bars.\n"
        parts.append("\n" + table(header, rows) + met + source(result))
    return "".join(parts) or NOTHING


def _of_simulated(record: Mapping[str, Any]) -> tuple[str, str, str]:
    off = f"{100 * record['off']:+.0f} %"
    return (
        written(record["measured_ms"]),
        written(record["simulated_ms"]),
        f"**{off}**" if record.get("within") is False else off,
    )


_ON_H200 = {
    "time between tokens, P50": ("text ITL P50", "", ("itl_seconds", "p50")),
    "time between tokens, largest": ("text ITL max", "", ("itl_seconds", "largest")),
    "TTFT of images, P50": ("image TTFT P50", "image", ("ttft_seconds", "p50")),
    "TTFT of text, P50": ("text TTFT P50", "text", ("ttft_seconds", "p50")),
}
"""Rows -> measure of `benchmarks.mixed`, modality, and where the summary of a simulation has it."""


def h200(gpu: Sequence[Result], study: Mapping[str, Any]) -> str:
    """Show a whole vLLM on one H200 beside the simulation of the same requests, which nothing was calibrated for."""
    (part,) = parts_of_gpu(gpu, "vllm")
    line = lines_of(part["results"], "measure")
    summaries = {one["variant"]: one["summary"] for one in study["results"]}
    sides = {"stock": summaries["stock"], "ours": summaries["chat"]}
    rows = []
    for name, (measure, modality, (group, at)) in _ON_H200.items():
        cells = list[str]()
        for variant, summary in sides.items():
            measured = line[measure][variant]["median"]
            predicted = 1e3 * (summary["by_modality"][modality] if modality else summary)[group][at]
            cells += [written(measured), written(predicted), f"{100 * (predicted / measured - 1):+.0f} %"]
        rows.append((name, *cells))
    within = (
        (f"{line['within SLO %'][variant]['median']:.1f} %", f"{100 * summary['within_slo']:.1f} %", "")
        for variant, summary in sides.items()
    )
    rows.append(("requests within the SLO", *(cell for cells in within for cell in cells)))
    header = ("ms", *(f"{variant} {name}" for variant in sides for name in ("measured", "simulated", "off")))
    p = study["provenance"]
    told = f"\n*Simulated: `{p['command']}`, {p['date'][:10]}, revision {p['revision']}.*\n"
    return "\n" + table(header, rows) + source(part) + told


def forecasts(results: Sequence[Result]) -> str:
    """Show the errors of forecasts of recorded arrivals, beside naive and seasonal naive."""
    parts = []
    for result in results:
        if "source" not in result["provenance"]["workload"]:
            continue  # made-up arrivals
        rows = []
        for r in result["results"]:
            mape = [_part(r["mape"].get(name)) for name in ("ours", "naive", "seasonal_naive")]
            wql = [_loss(r.get(name)) for name in ("wql", "naive_wql")]
            ahead = f"{r['horizon_seconds'] / 60:.0f} min"
            rows.append((r["pattern"], f"{r['days']:.0f}", ahead, *mape, *wql, _part(r["coverage"])))
        header = ("category", "days", "ahead", "MAPE", "naive", "seasonal", "WQL", "naive", "in 80 %")
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


def _part(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"

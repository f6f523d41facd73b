"""Tables of the page on fidelity: the back-test, and forecasts of recorded arrivals."""

from collections.abc import Mapping, Sequence
from typing import Any

from result_tables import NOTHING, Result, source, table

_MEASURES = (
    "TTFT P50",
    "TTFT P99",
    "ITL P50",
    "ITL P99",
    "end to end P50",
    "end to end P99",
    "tokens / s",
    "within SLO",
)


def backtest(results: Sequence[Result]) -> str:
    """Show each trace and figure of the newest result: measured, predicted, error and spread; misses in bold.

    Of the others, what they met.
    """
    if not results:
        return NOTHING
    *others, newest = sorted(results, key=lambda result: str(result["provenance"]["date"]))
    records = {(r["trace"], r["figure"], r["variant"]): r for r in newest["results"]}
    traces = dict.fromkeys(r["trace"] for r in newest["results"])
    variants = list(dict.fromkeys(r["variant"] for r in newest["results"]))
    rows = [
        (trace, measure, *(cell for v in variants for cell in _cells(records[trace, measure, v])))
        for trace in traces
        for measure in _MEASURES
    ]
    names = ("measured", "predicted", "off", "spread")
    header = (
        "trace",
        "ms unless said",
        *(f"{v} {name}" if name == names[0] else name for v in variants for name in names),
    )
    barred = [r for r in newest["results"] if r["within"] is not None]
    explained = sum(not r["within"] and bool(r["explained"]) for r in barred)
    beyond = (
        f"Of the others, {explained} are off by less than the repetitions are apart."
        if all(len(r["rounds"]) > 1 for r in barred)
        else "Each trace was replayed once, so how far repetitions are apart is not known."
    )
    earlier = "".join(
        f"- Earlier, seed {told['seed']}: {_met(result)} *(`{told['command']}`, revision {told['revision']})*\n"
        for result in others
        for told in [result["provenance"]]
    )
    said = f"\nWithin the bars, seed {newest['provenance']['seed']}: {_met(newest)} {beyond}{_starts(newest)}\n\n"
    return "\n" + table(header, rows) + said + earlier + source(newest)


def _met(result: Result) -> str:
    barred = [r for r in result["results"] if r["within"] is not None]
    met = {part: [r["within"] for r in barred if r["figure"].endswith(part)] for part in ("P50", "P99")}
    slower = result["provenance"].get("slower_than_calibrated")
    pace = "" if slower is None else f" A fixed piece of work took {slower:.2f} times as long as at the calibration."
    return ", ".join(f"{sum(own)} of {len(own)} {part}" for part, own in met.items()) + "." + pace


def _starts(result: Result) -> str:
    """Say how far single starts of the calibrated servers are from the costs, which are those of the median start."""
    starts = result["provenance"].get("calibration", {}).get("starts", {})
    variants = {"server": "stock", "with_lane": "ours"}
    said = [
        f"{name.replace('_', ' ')} of {variants[server]} {min(times):.2f} to {max(times):.2f}"
        for server, of in starts.items()
        for name, times in of.items()
        if len(times) > 1
    ]
    return f" Single starts at the calibration took, of its costs: {', '.join(said)}." if said else ""


def _cells(record: Mapping[str, Any]) -> tuple[str, ...]:
    share, speed = record["figure"] == "within SLO", record["figure"] == "tokens / s"
    numbers = [
        f"{100 * record[key]:.0f} %" if share else f"{record[key]:.0f}" if speed else _milliseconds(1e3 * record[key])
        for key in ("measured", "predicted")
    ]
    off = f"{100 * record['off']:+.0f} %"
    spread = f"{100 * record['spread']:.0f} %" if len(record["rounds"]) > 1 else "–"
    return (*numbers, f"**{off}**" if record["within"] is False else off, spread)


def _milliseconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def forecasts(results: Sequence[Result]) -> str:
    """Show the errors of forecasts of recorded arrivals, beside naive and seasonal naive."""
    parts = []
    for result in results:
        if "source" not in result["provenance"]["workload"]:
            continue  # made-up arrivals
        rows = []
        for r in result["results"]:
            mape = [_part(r["mape"].get(name)) for name in ("ours", "naive", "seasonal_naive")]
            wql = [_loss(r.get(name)) for name in ("wql", "naive_wql", "seasonal_naive_wql")]
            naive = sum(share for model, share in r["spoke"].items() if model.startswith("naive"))
            ahead = f"{r['horizon_seconds'] / 60:.0f} min"
            rows.append((r["pattern"], f"{r['days']:.0f}", ahead, *mape, *wql, _part(r["coverage"]), _part(naive)))
        header = (
            "category",
            "days",
            "ahead",
            "MAPE",
            "naive",
            "seasonal",
            "WQL",
            "naive",
            "seasonal",
            "in 80 %",
            "naive used",
        )
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


def _part(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"

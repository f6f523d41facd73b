"""What the rounds of each variant say, as a table and as the results of a file."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from benchmarks.harness.stats import Summary, quantile
from benchmarks.mixed.pooled import gaps_beside, met_slo, of_kind, pooled

Case = float | str
"""A load, or the name of a workload."""
Answers = dict[tuple[str, Case], list[dict[str, Any]]]
"""(variant, case) -> its rounds."""


def measures(answer: dict[str, Any]) -> dict[str, float]:
    """Return the measures of one round; latencies in milliseconds, of text and of image requests apart."""
    text, image = of_kind(answer, "text"), of_kind(answer, "image")
    gaps = [gap * 1e3 for r in text for gap in r["gaps"]]
    good = met_slo(answer)
    beside = [gap * 1e3 for gap in gaps_beside(text, image)]
    found = {}
    if gaps:  # a short round may have no text request
        found |= {
            "text ITL P50": quantile(gaps, 0.5),
            "text ITL P99": quantile(gaps, 0.99),
            "text ITL max": max(gaps),
            "text TTFT P50": quantile([r["ttft"] * 1e3 for r in text], 0.5),
        }
    if good:
        found["within SLO %"] = 100.0 * statistics.fmean(good)
        found["tokens / s"] = sum(r["tokens"] for r in answer["requests"]) / answer["seconds"]
    if beside:
        found |= {"ITL beside images P50": quantile(beside, 0.5), "ITL beside images P99": quantile(beside, 0.99)}
    latencies = [1e3 * seconds for r in answer["requests"] for seconds in r.get("latencies", ())]
    if latencies:
        found |= {"session P50": quantile(latencies, 0.5), "session P99": quantile(latencies, 0.99)}
    if image:
        ttft = [r["ttft"] * 1e3 for r in image]
        found |= {"image TTFT P50": quantile(ttft, 0.5), "image TTFT P99": quantile(ttft, 0.99)}
    return found


def table(answers: Answers, load: Case, variants: Sequence[str], title: str) -> Table:
    """Return the medians over the rounds, with the spread; the ratio is the median of the ratios round by round."""
    rounds = {variant: [measures(answer) for answer in answers[variant, load]] for variant in variants}
    shown = Table(title=title, title_justify="left", title_style="bold")
    shown.add_column("ms unless said")
    for variant in variants:
        shown.add_column(variant, justify="right")
        if variant != variants[0]:
            shown.add_column(f"of {variants[0]}", justify="right")
    for name in dict.fromkeys(name for of_one in rounds.values() for r in of_one for name in r):
        cells = []
        for variant in variants:
            own = [r[name] for r in rounds[variant] if name in r]
            cells.append(f"{statistics.median(own):.4g} ({min(own):.3g}-{max(own):.3g})" if own else "")
            if variant != variants[0]:
                base = [r[name] for r in rounds[variants[0]] if name in r]
                ratios = [a / b for a, b in zip(own, base, strict=False) if b]
                cells.append(f"{statistics.median(ratios):.3f}" if ratios else "")
        shown.add_row(name, *cells)
    for variant in variants[1:]:
        for of_all in pooled(answers[variant, load], answers[variants[0], load]):
            if "ratio" in of_all:
                low, high = of_all["ratio_interval"]
                value = f"{of_all['ratio']:.3f} [{low:.2f}, {high:.2f}]"
                cells = [value if other == variant else "" for other in variants[1:]]
                shown.add_row(of_all["measure"], "", *[cell for one in cells for cell in ("", one)])
    same = same_tokens(answers, load, variants)
    if same:
        shown.add_row("requests with the same tokens %", "", *[f"{100 * statistics.fmean(same):.4g}", ""])
    return shown


def same_tokens(answers: Answers, load: Case, variants: Sequence[str]) -> list[bool]:
    """Return, for each request of each variant, whether it got the first variant's tokens; failed ones are left out."""
    return [
        a["digest"] == b["digest"]
        for variant in variants[1:]
        for mine, base in zip(answers[variant, load], answers[variants[0], load], strict=True)
        for a, b in _pairs(mine, base)
    ]


def _pairs(mine: dict[str, Any], base: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the requests that both rounds have answered, in pairs."""
    failed = {request["number"] for answer in (mine, base) for request in answer.get("failed", ())}
    kept = ([r for r in answer["requests"] if r.get("number") not in failed] for answer in (mine, base))
    return zip(*kept, strict=True)


def whole(answers: Answers) -> Answers:
    """Return the rounds that all variants have ended at a load, in case the last one was interrupted."""
    variants = {variant for variant, _ in answers}
    ended = {load: min(len(answers.get((variant, load), ())) for variant in variants) for _, load in answers}
    return {(variant, load): rounds[: ended[load]] for (variant, load), rounds in answers.items() if ended[load]}


def record(answers: Answers) -> list[dict[str, Any]]:
    """Return the results for the file, by variant, load and measure, of the rounds that all variants have ended."""
    answers = whole(answers)
    found = []
    for (variant, load), rounds in answers.items():
        values: dict[str, list[float]] = {}
        for answer in rounds:
            for name, value in measures(answer).items():
                values.setdefault(name, []).append(value)
        for name, own in values.items():
            found.append({"variant": variant, "load": load, "measure": name, **Summary.of(own).as_dict(3)})
    variants = list(dict.fromkeys(variant for variant, _ in answers))
    for (variant, load), rounds in answers.items():
        for of_all in pooled(rounds, answers[variants[0], load]):
            spread = {"least": of_all["median"], "most": of_all["median"], "iqr": 0.0}
            found.append({"variant": variant, "load": load, **rounded({**of_all, **spread})})
    for load in dict.fromkeys(load for _, load in answers):
        for variant in variants[1:]:
            same = [100.0 * value for value in same_tokens(answers, load, [variants[0], variant])]
            if same:
                name = f"requests with the tokens of {variants[0]} %"
                found.append({"variant": variant, "load": load, "measure": name, **Summary.of(same).as_dict(3)})
    return found


def rounded(record: dict[str, Any], digits: int = 4) -> dict[str, Any]:
    """Return the record with its numbers, and those in its lists, rounded."""
    return {
        key: round(value, digits)
        if isinstance(value, float)
        else [round(one, digits) for one in value]
        if isinstance(value, list)
        else value
        for key, value in record.items()
    }

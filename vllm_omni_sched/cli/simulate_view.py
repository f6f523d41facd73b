"""The output of `vllm-omni-sched simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.progress import TextColumn
from rich.table import Table
from rich.text import Text

from vllm_omni_sched.cli.console import plain_table, progress_bar
from vllm_omni_sched.clock import monotonic_seconds

if TYPE_CHECKING:
    from vllm_omni_sched.sim.study.evaluate import Finding
    from vllm_omni_sched.sim.study.options import Search
    from vllm_omni_sched.sim.study.plan import Point, Study

_FOUND = {
    "max_rate": "largest rate in SLO, req/s",
    "tightest_slo": "tightest SLO, × its times",
    "throughput": "saturated, tokens/s",
}


def _found(search: Search) -> str:
    """Return the heading of the column for the result of a search."""
    if search.kind == "max_rate" and search.key != "workload.rate":
        return f"largest {search.key} in SLO"
    return _FOUND[search.kind]


class Bar:
    """A progress bar on stderr: simulated time of a run, points of a study, events per second."""

    def __init__(self, study: Study, quiet: bool) -> None:
        self._single = study.single
        self._seconds = study.base.duration_seconds
        self._bar = progress_bar(TextColumn("{task.fields[text]}"), quiet=quiet)
        total = self._seconds if self._single else len(study.points)
        self._task = self._bar.add_task("Simulating", total=total, text="")
        self._began, self._events = monotonic_seconds(), 0

    def __enter__(self) -> Bar:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Remove the bar."""
        self._bar.stop()

    def progress(self, point: Point, seconds: float, events: int) -> None:
        """Update the bar for the current run."""
        if events < self._events:  # another run
            self._began, self._events = monotonic_seconds(), 0
        elapsed = monotonic_seconds() - self._began
        rate = f", {events / elapsed:,.0f} events/s" if elapsed > 0.1 else ""
        self._events = events
        text = f"{seconds:,.0f} s simulated{rate}"
        if self._single:
            self._bar.update(self._task, completed=min(seconds, self._seconds), text=text)
        else:
            self._bar.update(self._task, description=point.label, text=text)

    def done(self, finding: Finding) -> None:
        """Count a finished point."""
        if not self._single:
            self._bar.update(self._task, advance=1, description=finding.label)


def screen(study: Study, findings: Sequence[Finding]) -> RenderableType:
    """Return one run in full, or a table with a row for each point."""
    head = Text.assemble((study.base.name, "bold"), "  ", ("simulated", "dim"))
    if study.single:
        return Group(head, "", *(_one(finding) for finding in findings if not finding.error))
    parts: list[RenderableType] = [head, ""]
    if study.repeats > 1:
        parts += [_spread(study, findings), Text("mean and 95 % interval over seeds (Student's t)", "dim")]
    else:
        parts.append(_rows(study, findings))
    if chosen := _chosen(findings):
        parts += ["", chosen]
    return Group(*parts)


def _one(finding: Finding) -> RenderableType:
    summary = finding.summary
    times = plain_table(("", "requests", "within SLO", "", "P50", "P90", "P99", "largest"), left=("",))
    parts = {"all": summary, **(summary["by_modality"] if len(summary["by_modality"]) > 1 else {})}
    parts |= summary["by_class"] if len(summary["by_class"]) > 1 else {}
    for name, part in parts.items():
        first = (name, f"{part['requests']:,}", _part(part["within_slo"]))
        for measure in ("ttft", "itl", "tpot", "latency"):
            measured = part[f"{measure}_seconds"]
            if measured is not None:
                values = [_seconds(measured[key]) for key in ("p50", "p90", "p99", "largest")]
                times.add_row(*first, measure.upper() if measure != "latency" else measure, *values)
                first = ("", "", "")
    facts = Table(box=None, pad_edge=False, show_header=False)
    for name, value in _facts(summary):
        facts.add_row(Text(name, "dim"), value)
    return Group(times, "", facts)


def _facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        ("goodput", f"{summary['goodput_per_second']:.3g} requests/s"),
        (
            "throughput",
            f"{summary['requests_per_second']:.3g} requests/s, {summary['tokens_per_second']:,.0f} tokens/s",
        ),
    ]
    for stage, parts in summary["utilisation"].items():
        works = ", ".join(f"{work} {part:.0%}" for work, part in parts.items() if work != "all")
        facts.append((f"{stage} busy", f"{parts['all']:.0%}" + (f"  ({works})" if works else "")))
    hours = summary["gpu_hours_per_1000_requests"]
    if hours is not None:
        facts.append(("device hours", f"{hours:.3g} per 1,000 requests"))
    if summary["failed"] or summary["lost"]:
        facts.append(("failed", f"{summary['failed']:,}, not finished {summary['lost']:,}"))
    facts += [(reason, f"{times:,}") for reason, times in summary["counters"].items() if times]
    facts.append(("simulated", f"{summary['simulated_seconds']:,.0f} s, {summary['events']:,} events"))
    return facts


def _table_of(study: Study, *measures: str) -> Table:
    """Return an empty table of points: variant if there are several, swept keys, the number searched for, measures."""
    heads = _point(study, "variant", {key: key.split(".", 1)[-1] for key in study.points[0].values})
    heads += [_found(study.search)] if study.search is not None else []
    return plain_table([*heads, *measures], left=("variant",))


def _point(study: Study, variant: str, values: Mapping[str, Any]) -> list[str]:
    named = any(point.variant for point in study.points)
    return [variant] * named + [str(values[key]) for key in study.points[0].values]


def _rows(study: Study, findings: Sequence[Finding]) -> Table:
    table = _table_of(study, "within SLO", "TTFT P99", "ITL P99", "goodput/s", "device h/1,000")
    for finding in findings:
        cells = _point(study, finding.variant, finding.values)
        if finding.error:
            table.add_row(*cells, Text("failed", "red"))
            continue
        if finding.found is not None:
            value = finding.found["value"]
            cells.append("never met" if not value else f"{value:.3g}" + _doubt(finding.found))
        summary = finding.summary
        hours = summary["gpu_hours_per_1000_requests"]
        itl = summary["itl_seconds"] or {"p99": None}
        table.add_row(
            *cells,
            _part(summary["within_slo"]),
            _seconds(summary["ttft_seconds"]["p99"]),
            _seconds(itl["p99"]),
            f"{summary['goodput_per_second']:.3g}",
            "–" if hours is None else f"{hours:.3g}",
        )
    return table


def _spread(study: Study, findings: Sequence[Finding]) -> Table:
    """Return a table with one row for all seeds of a point."""
    from vllm_omni_sched.sim.study.report import spread

    table = _table_of(study, "within SLO", "TTFT P99, s", "ITL P99, ms", "goodput/s", "seeds")
    for row in spread(findings):
        cells = _point(study, row["variant"], row["values"])
        cells += [_interval(row.get("value"))] if study.search is not None else []
        cells += [_interval(row.get("within_slo"), 100, " %")]
        cells += [_interval(row.get("ttft_p99_seconds")), _interval(row.get("itl_p99_seconds"), 1000)]
        table.add_row(*cells, _interval(row.get("goodput_per_second")), str(len(row["seeds"])))
    for finding in findings:
        if finding.error:
            cells = _point(study, finding.variant, finding.values)
            table.add_row(*cells, Text(f"seed {finding.seed} failed", "red"))
    return table


def _interval(measured: dict[str, float] | None, times: float = 1.0, unit: str = "") -> str:
    if measured is None:
        return "–"
    mean, half = times * measured["mean"], times * (measured["high"] - measured["mean"])
    return f"{mean:.3g} ± {half:.2g}{unit}"


def _chosen(findings: Sequence[Finding]) -> Table | None:
    """Return a table of the options chosen for each tuned point; None if no point was tuned."""
    tuned = {(one.variant, repr(one.values)): one for one in findings if one.tuned is not None}
    if not tuned:
        return None
    table = plain_table(names := ("tuned", "trials", "chosen"), left=names)
    for one in tuned.values():
        assert one.tuned is not None
        table.add_row(one.label, str(one.tuned["trials"]), flags(one.tuned["chosen"]))
    return table


def flags(chosen: Mapping[str, Any]) -> str:
    """Return the chosen options in one line, each key by its last part."""
    from vllm_omni_sched.sim.study.plan import settings

    return ", ".join(f"{key.split('.')[-1]} {value}" for key, value in settings(chosen).items() if key != "stages")


def _doubt(found: dict[str, Any]) -> str:
    """Return a note for a number with a reservation, such as a load that never saturated."""
    if found.get("saturated") is False:
        return " (not saturated)"
    if found.get("monotone") is False:
        return " (not monotone)"
    return " or more" if found["kind"] == "max_rate" and found["fails_at"] is None else ""


def _part(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"

"""``vllm-omni-sched faults``: shows the journal of faults of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from vllm_omni_sched.bounded_log import lines_of
from vllm_omni_sched.cli.console import PROBLEM, USAGE, leave, page_console
from vllm_omni_sched.clock import wall_seconds
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.units import UnitError, seconds_of
from vllm_omni_sched.monitor.journal.fault import Fault, FaultKind, fault_of, line_of

TOGETHER_SECONDS = 1.0  # equal entries that follow each other within this time are one row


@dataclass
class Row:
    """Equal entries that follow each other: the first of them, how many, and the requests that they affect."""

    fault: Fault
    entries: int
    requests: int
    last: float


def faults(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The journal: option monitoring.journal.path.", show_default=False)
    ],
    since: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Only entries of this time, such as 2h, 30min or 7d.")
    ] = None,
    stage: Annotated[str | None, typer.Option(metavar="NAME", help="Only this stage, by its name or id.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the entries as lines of JSON.")] = False,
) -> None:
    """Show what failed in a pipeline, what was decided and what was done, oldest first.

    Exit status: 0 on success, also if there are no entries; 1 if the journal cannot be read, or is none; 2 if an
    argument is invalid.
    """
    after = float("-inf") if since is None else wall_seconds() - _duration(since)
    unreadable: Counter[str] = Counter()
    try:
        entries = [*_entries(file, unreadable)]
    except OSError as error:
        leave("faults", PROBLEM, f"{file} cannot be read: {error.strerror or error}")
    if unreadable and not entries:
        leave(
            "faults",
            PROBLEM,
            f"{file} is no journal of faults: none of its {unreadable.total()} lines is an entry; give the file that "
            "the option monitoring.journal.path names",
        )
    found = [one for one in entries if one.at >= after]
    shown = [one for one in found if stage is None or stage in (one.name, str(one.stage))]
    if stage is not None and not shown and found:
        known = sorted({one.name or str(one.stage) for one in found if one.stage >= 0})
        typer.echo(f"no entries of stage {stage!r}; there are entries of {', '.join(known) or 'no stage'}", err=True)
    if as_json:
        for one in shown:
            typer.echo(line_of(one).decode(), nl=False)
    else:
        page_console().print(table_of(shown))
        typer.echo(summary_of(shown))
    if unreadable:
        typer.echo(f"{sum(unreadable.values())} lines are no entries, and were skipped", err=True)


def table_of(found: Iterable[Fault]) -> Table:
    """Return the entries as a table; times are local."""
    table = Table(box=None, pad_edge=False)
    for column in ("time", "fault", "stage", "replica", "requests", "seconds", "cause"):
        right = column in ("replica", "requests", "seconds")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=column == "time")
    for row in rows_of(found):
        one = row.fault
        table.add_row(
            datetime.fromtimestamp(one.at).astimezone().isoformat(sep=" ", timespec="milliseconds"),
            one.kind if row.entries == 1 else f"{one.kind} ×{row.entries}",
            one.name if one.stage < 0 else f"{one.name} ({one.stage})" if one.name else str(one.stage),
            "" if one.replica < 0 else str(one.replica),
            f"{row.requests:,}" if row.requests else "",
            "" if one.seconds is None else f"{one.seconds:,.3g}" if one.seconds < 100 else f"{one.seconds:,.0f}",
            Text(_cause(row), "dim"),
        )
    return table


def _cause(row: Row) -> str:
    one = row.fault
    parts = [one.cause] if one.cause else []
    if one.request_id and row.entries == 1:
        parts.append(f"request {one.request_id}")
    if one.evidence:
        parts.append(", ".join(f"{name} {value:.4g}" for name, value in one.evidence.items()))
    return "; ".join(parts)


def rows_of(found: Iterable[Fault]) -> Iterator[Row]:
    """Yield the rows of a table: equal entries that follow each other at once, such as of one death, are one."""
    row: Row | None = None
    for one in found:
        same = row is not None and (row.fault.kind, row.fault.stage, row.fault.replica, row.fault.cause) == (
            one.kind,
            one.stage,
            one.replica,
            one.cause,
        )
        if row is not None and same and one.at - row.last <= TOGETHER_SECONDS and one.request_id:
            row.entries, row.requests, row.last = row.entries + 1, row.requests + one.requests, one.at
            continue
        if row is not None:
            yield row
        row = Row(one, 1, one.requests, one.at)
    if row is not None:
        yield row


def summary_of(found: list[Fault]) -> str:
    """Return how many entries there are of each kind, and the requests that ran again or failed."""
    if not found:
        return "no entries"
    kinds = Counter(one.kind for one in found)
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    again, failed = (
        sum(one.requests for one in found if one.kind == kind.value)
        for kind in (FaultKind.REDISPATCHED, FaultKind.FAILED)
    )
    return f"{len(found)} entries: {listed}. Requests: {again} ran again, {failed} failed."


def _entries(file: Path, unreadable: Counter[str]) -> Iterator[Fault]:
    """Yield the entries of both files, the older one first; count lines that are none.

    Raises:
        OSError: the journal cannot be read.
    """
    for line in lines_of(file):
        try:
            yield fault_of(line)
        except ConfigError:
            unreadable[str(file)] += 1


def _duration(text: str) -> float:
    try:
        return float(seconds_of(text))
    except UnitError as error:
        leave("faults", USAGE, f"--since: {error}")

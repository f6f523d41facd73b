"""``vllm-omni-sched explain``: says why a request waited, from the history of requests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from vllm_omni_sched.bounded_log import lines_of
from vllm_omni_sched.cli.console import HISTORY, PROBLEM, leave, page_console, plain_table
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.core.engine.explanation import sentence_of, summary_of, waits_of
from vllm_omni_sched.core.engine.history_lines import HistoryLine, entry_of

SHOWN = 5  # requests that an error names


def explain(
    request_id: Annotated[
        str, typer.Argument(metavar="REQUEST_ID", help="The id of the answer, such as chatcmpl-…", show_default=False)
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The history: option expert.history_path.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each request.")] = False,
) -> None:
    """Say what happened to a request in the engine, and for what it waited until its first token.

    Exit status: 0 on success; 1 if the history cannot be read, is none, or has no line of the request.
    """
    unreadable: Counter[str] = Counter()
    found: dict[str, list[HistoryLine]] = {}
    latest: dict[str, None] = {}
    try:
        for entry in _entries(file, unreadable):
            if _is_of(entry.request_id, request_id):
                found.setdefault(entry.request_id, []).append(entry)
            elif entry.request_id and not found:
                latest.pop(entry.request_id, None)
                latest[entry.request_id] = None
    except OSError as error:
        leave("explain", PROBLEM, f"{file} cannot be read: {error.strerror or error}")
    if not found:
        leave("explain", PROBLEM, _why_not(file, request_id, [*latest][-SHOWN:], unreadable.total()))
    for name, entries in found.items():
        if as_json:
            typer.echo(json.dumps(_values(name, entries)))
        else:
            _print(name, entries)
    if unreadable:
        typer.echo(f"{unreadable.total()} lines are none of a history, and were skipped", err=True)


def _why_not(file: Path, request_id: str, latest: list[str], unreadable: int) -> str:
    """Return why a request cannot be explained; ``unreadable``: how many lines of the file were skipped."""
    if not latest and unreadable:
        return f"{file} is no history of requests: none of its {unreadable} lines is one of a history; give {HISTORY}"
    if not latest:
        return f"{file} has no lines of any request yet; is it {HISTORY}?"
    skipped = f"; skipped lines that are none of a history: {unreadable}" if unreadable else ""
    return f"{file} has no lines of request {request_id!r}; the latest ones are of {', '.join(latest)}{skipped}"


def _is_of(found: str, asked: str) -> bool:
    """Return whether the id of a request in the engine is the id that its client knows, or made from it.

    vLLM appends random characters to an id, and puts the number of a completion before it, with ``n`` above 1.
    """
    if found == asked or found.startswith(f"{asked}-"):
        return True
    number, _, rest = found.partition("_")
    return number.isdecimal() and (rest == asked or rest.startswith(f"{asked}-"))


def _values(name: str, entries: list[HistoryLine]) -> dict[str, object]:
    waits = {cause.name.lower(): seconds for cause, seconds in waits_of(entries).items()}
    return {"request_id": name, "waits_seconds": waits, "entries": msgspec.to_builtins(entries)}


def _print(name: str, entries: list[HistoryLine]) -> None:
    began = entries[0].at
    when = datetime.fromtimestamp(began).astimezone().isoformat(sep=" ", timespec="milliseconds")
    typer.echo(f"{name}, {when}")
    table: Table = plain_table(("seconds", "what happened"), left=("what happened",))
    table.columns[1].overflow = "fold"
    for entry in entries:
        table.add_row(f"{entry.at - began:.3f}", sentence_of(entry))
    page_console(markup=False).print(table)
    typer.echo(summary_of(entries))


def _entries(file: Path, unreadable: Counter[str]) -> Iterator[HistoryLine]:
    """Yield the lines of both files, the older one first; count those that are none.

    Raises:
        OSError: the history cannot be read.
    """
    for line in lines_of(file):
        try:
            yield entry_of(line)
        except ConfigError:
            unreadable[str(file)] += 1

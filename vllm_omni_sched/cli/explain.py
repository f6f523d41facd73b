"""``vllm-omni-sched explain``: says why a request waited, from the history of requests."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import takewhile
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
_APPENDED = re.compile(r"-[0-9a-f]{8}$")  # by vLLM, to the id that a client knows


def explain(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="The id of the answer, such as chatcmpl-…, or its beginning; what is before the dash may be left out.",
            show_default=False,
        ),
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The history: option expert.history_path.", show_default=False)
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each request.")] = False,
) -> None:
    """Say what happened to a request in the engine, and for what it waited until its first token.

    Exit status: 0 on success; 1 if the history cannot be read, is none, or has no line of the request, or if the
    beginning of an id is that of several.
    """
    unreadable: Counter[str] = Counter()
    try:
        known = {one.request_id: None for one in _entries(file, unreadable) if one.request_id}
        skipped = unreadable.total()
        chosen = _chosen(known, request_id)
        if len({_id_of_client(one) for one in chosen}) != 1:
            leave("explain", PROBLEM, _why_not(file, request_id, [*known], chosen, skipped))
        found: dict[str, list[HistoryLine]] = {name: [] for name in chosen}
        for entry in _entries(file, Counter()):
            if entry.request_id in found:
                found[entry.request_id].append(entry)
    except OSError as error:
        leave("explain", PROBLEM, f"{file} cannot be read: {error.strerror or error}")
    for name, entries in found.items():
        if as_json:
            typer.echo(json.dumps(_values(name, entries)))
        else:
            _print(name, entries)
    if skipped:
        typer.echo(f"{skipped} lines are none of a history, and were skipped", err=True)


def _why_not(file: Path, request_id: str, known: list[str], chosen: list[str], skipped: int) -> str:
    """Return why no request is explained; ``skipped``: how many lines of the file are none of a history."""
    if not known and skipped:
        return f"{file} is no history of requests: none of its {skipped} lines is one of a history; give {HISTORY}"
    if not known:
        return f"{file} has no lines of any request yet; is it {HISTORY}?"
    if chosen:
        several = [*dict.fromkeys(map(_id_of_client, chosen))]
        more = f" and {len(several) - SHOWN} more" if len(several) > SHOWN else ""
        return f"{request_id!r} is the beginning of several ids: {', '.join(several[:SHOWN])}{more}; give more of it"
    lines = f"; skipped lines that are none of a history: {skipped}" if skipped else ""
    near = sorted(dict.fromkeys(map(_id_of_client, reversed(known))), key=lambda one: -_alike(one, request_id))[:SHOWN]
    return f"{file} has no lines of request {request_id!r}; the nearest ones are {', '.join(near)}{lines}"


def _id_of_client(request_id: str) -> str:
    """Return the id that a client knows for a request in the engine.

    vLLM appends random characters to it, and puts the number of a completion before it, with ``n`` above 1.
    """
    number, _, rest = request_id.partition("_")
    return _APPENDED.sub("", rest if number.isdecimal() and rest else request_id)


def _names(request_id: str) -> tuple[str, str, str]:
    """Return what a request may be called: its id in the engine, that of its client, and this one without its kind."""
    of_client = _id_of_client(request_id)
    return request_id, of_client, of_client.partition("-")[2]


def _chosen(known: Iterable[str], asked: str) -> list[str]:
    """Return the requests with this id; if there are none, those whose id begins with it."""
    ids = [*known]
    return [one for one in ids if asked in _names(one)] or [
        one for one in ids if any(name.startswith(asked) for name in _names(one))
    ]


def _alike(request_id: str, asked: str) -> int:
    """Return how many characters the two ids have in common, at their beginnings or at their ends."""
    pairs = [pair for name in _names(request_id)[1:] for pair in ((name, asked), (name[::-1], asked[::-1]))]
    return max(sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(*pair, strict=False))) for pair in pairs)


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

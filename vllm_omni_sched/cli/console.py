"""What the commands share: errors of one line, progress on stderr, and tables."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperCommand

PROBLEM, USAGE, INTERRUPTED = 1, 2, 130
"""Exit statuses."""
HISTORY = "the file that the option expert.history_path of the server names"
"""Names the file of a history of requests, for errors of the commands that read one."""
_PIPED_WIDTH = 10_000


class Command(TyperCommand):
    """Writes a usage line whose names of arguments have no braces, which look like choices."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line."""
        return [one.removeprefix("{").removesuffix("}") for one in super().collect_usage_pieces(ctx)]


def page_console(*, markup: bool = True) -> Console:
    """Return the console for the output of a command: nothing is cut or wrapped where it is no terminal.

    Args:
        markup: whether texts may have rich's tags, such as ``[bold]``; without it, brackets are printed as they are.
    """
    console = Console(highlight=False, markup=markup)
    piped = not console.is_terminal and "COLUMNS" not in os.environ
    return Console(highlight=False, markup=markup, width=_PIPED_WIDTH) if piped else console


def leave(command: str, status: int, message: str) -> NoReturn:
    """Print an error of a command in one line, and exit."""
    typer.echo(f"vllm-omni-sched {command}: {' '.join(message.split())}", err=True)
    raise typer.Exit(status)


def progress_bar(*columns: ProgressColumn, quiet: bool = False, transient: bool = True) -> Progress:
    """Return a progress bar on stderr, with a description, these further columns, and the elapsed time."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=transient,
        disable=quiet,
    )


def section(title: str, *columns: str) -> Table:
    """Return an empty table with a title and without a header; the column ``symbol`` is not wrapped."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "symbol")
    return table


def plain_table(columns: Iterable[str], left: Iterable[str] = ()) -> Table:
    """Return an empty table with these columns, numbers to the right; those in ``left`` are texts."""
    table, texts = Table(box=None, pad_edge=False, header_style="dim"), set(left)
    for name in columns:
        table.add_column(name, justify="left" if name in texts else "right")
    return table

"""Tables for the findings of `doctor`."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from vllm_omni_sched.compat import Status
from vllm_omni_sched.config import ResolvedOption

YES, NO, ABSENT = Text("✓", "green"), Text("✗", "red"), Text("–", "dim")


def section(title: str, *columns: str) -> Table:
    """Return an empty table without a header; the column ``symbol`` is not wrapped."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "symbol")
    return table


def options_table(title: str, options: Sequence[ResolvedOption]) -> Table:
    """Return a table of the options with their values and sources."""
    table = section(title, "option", "value", "source")
    for option in options:
        style, source = ("bold", "given") if option.given else ("dim", "default")
        table.add_row(f"  {option.name}", option.shown, source, style=style)
    return table


def statuses_table(title: str, statuses: Sequence[Status]) -> Table:
    """Return a table of features, with a tick for the active ones, and the reasons."""
    table = section(title, "mark", "feature", "reason")
    for status in statuses:
        table.add_row(Text("  ") + (YES if status.active else ABSENT), status.feature, Text(status.reason, "dim"))
    return table


def problems_table(title: str, problems: Sequence[str]) -> Table:
    """Return a table of the problems that prevent a server from starting."""
    table = section(title, "mark", "problem")
    table.title_style = "bold red"
    for problem in problems:
        table.add_row(Text("  ") + NO, problem)
    return table

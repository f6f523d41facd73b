"""``vllm-omni-sched doctor``: does our scheduler work here, with which features, and if not, why."""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_omni_sched.cli.diagnosis import Diagnosis, diagnose
from vllm_omni_sched.compat import Status
from vllm_omni_sched.config import ResolvedOption

YES, NO, ABSENT = Text("✓", "green"), Text("✗", "red"), Text("–", "dim")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    additional_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Check these options too: the value you give to vllm serve --additional-config.",
        ),
    ] = None,
) -> None:
    """Say in one screen what is installed, which features are active and why, and what would keep vLLM from starting.

    Exit status: 0 when vllm serve can start with our scheduler, 1 when it cannot.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # importing vLLM logs to stdout, where the answer goes
    waiting = Console(stderr=True).status("Importing vLLM ...")
    with waiting, contextlib.redirect_stdout(sys.stderr):
        findings = diagnose(_parsed(additional_config))
    if as_json:
        typer.echo(json.dumps(findings.as_dict(), indent=2))
    else:
        Console(highlight=False).print(screen(findings, with_options=additional_config is not None))
    raise typer.Exit(1 if findings.problems else 0)


def screen(findings: Diagnosis, *, with_options: bool = False) -> RenderableType:
    """The findings as one page: versions, options if they are asked for, features, video, extension points, verdict."""
    parts: list[RenderableType] = [_versions(findings)]
    if with_options and findings.options:
        parts.append(_options(findings.options))
    if findings.features:
        parts.append(_statuses("\nFeatures", findings.features))
    parts.append(_statuses("\nVideo loader omni_flashcodec", findings.video))
    if findings.probes:
        parts.append(_probes(findings))
    parts.append(_verdict(findings))
    return Group(*parts)


def _parsed(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--additional-config") from None


def _section(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "symbol")
    return table


def _versions(findings: Diagnosis) -> Table:
    table = _section("Versions", "part", "version", "note")
    for found in findings.versions:
        table.add_row(f"  {found.name}", found.version or Text("not installed", "dim"), Text(found.note, "dim"))
    return table


def _options(options: Sequence[ResolvedOption]) -> Table:
    table = _section("\nOptions", "option", "value", "source")
    for option in options:
        style, source = ("bold", "given") if option.given else ("dim", "default")
        table.add_row(f"  {option.name}", option.shown, source, style=style)
    return table


def _statuses(title: str, statuses: Sequence[Status]) -> Table:
    table = _section(title, "mark", "feature", "reason")
    for status in statuses:
        table.add_row(Text("  ") + (YES if status.active else ABSENT), status.feature, Text(status.reason, "dim"))
    return table


def _probes(findings: Diagnosis) -> Table:
    table = _section("\nExtension points of vLLM", "mark", "symbol", "what")
    for probe in {probe.symbol: probe for probe in findings.probes}.values():
        mark = YES if probe.available else NO if probe.reason == "missing" else ABSENT
        symbol = _short(probe.symbol) if probe.reason != "missing" else probe.symbol
        note = probe.name if probe.available else f"{probe.name}: {probe.reason}"
        table.add_row(Text("  ") + mark, symbol, Text(note, "dim"))
    return table


def _short(symbol: str) -> str:
    """Class and method, or the function: where it lives is in ``--json``."""
    parts = symbol.split(".")
    return ".".join(parts[-2:] if parts[-2][:1].isupper() else parts[-1:])


def _verdict(findings: Diagnosis) -> RenderableType:
    if not findings.problems:
        active = sum(status.active for status in findings.features)
        return Text(f"\n{active} of {len(findings.features)} features active. Serve with:\n").append(
            "  vllm serve MODEL --scheduler-cls vllm_omni_sched.OmniScheduler", "bold"
        )
    table = _section("\nCannot serve with vllm_omni_sched.OmniScheduler", "mark", "problem")
    table.title_style = "bold red"
    for problem in findings.problems:
        table.add_row(Text("  ") + NO, problem)
    return table

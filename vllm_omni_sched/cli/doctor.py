"""``vllm-omni-sched doctor``: reports whether our scheduler works here, with which features, and otherwise why not."""

import contextlib
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_omni_sched.cli.console import page_console, section
from vllm_omni_sched.cli.diagnosis import (
    Diagnosis,
    EdgeFinding,
    StageFinding,
    StagesDiagnosis,
    SuggestionFinding,
    diagnose,
    diagnose_stages,
)
from vllm_omni_sched.compat import Status
from vllm_omni_sched.config.load import KEY, ResolvedOption, Source
from vllm_omni_sched.config.stage_yaml import VARIABLE

_NAME = re.compile(r"[\w./~-]+")
"""A value that can be meant as the path of a file of options, or as the name of a profile."""
YES, NO, ABSENT = Text("✓", "green"), Text("✗", "red"), Text("–", "dim")


def options_table(title: str, options: Sequence[ResolvedOption]) -> Table:
    """Return a table of the options with their values and sources."""
    table = section(title, "option", "value", "source")
    for option in options:
        style = {Source.GIVEN: "bold", Source.PROFILE: ""}.get(option.source, "dim")
        table.add_row(f"  {option.name}", option.shown, option.source.value, style=style)
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


def stage_parts(found: StagesDiagnosis) -> list[RenderableType]:
    """Return tables of the active parts of each stage, the options, and the verdict."""
    parts: list[RenderableType] = []
    if found.options:
        parts.append(options_table(f"\nOptions of the stage scheduler, {found.file}", found.options))
    parts += [_stage(stage) for stage in found.stages]
    if found.edges:
        parts.append(_edges(found.edges))
    if found.suggestion is not None:
        parts += _suggestion(found.suggestion)
    if found.warnings:
        parts.append(problems_table("\nWrong on this host", found.warnings))
    if found.note:
        parts.append(Text(f"\n{found.note}"))
    parts.append(_stages_verdict(found))
    return parts


def _suggestion(found: SuggestionFinding) -> list[RenderableType]:
    parts: list[RenderableType] = [Text("\nDevices that the profiles speak for", "bold"), Text(f"  {found.note}")]
    parts += [Text(f"  {reason}", "dim") for reason in found.reasons]
    if found.stages:
        parts.append(Text(yaml.safe_dump({"stages": found.stages}, sort_keys=False).rstrip()))
    return parts


def _stage(stage: StageFinding) -> Table:
    replicas = f"{stage.replicas} replica{'s' if stage.replicas > 1 else ''}"
    where = f", devices {stage.devices}" if stage.devices else ""
    return statuses_table(f"\nStage {stage.name} ({stage.stage_id}), {stage.kind}, {replicas}{where}", stage.parts)


def _edges(edges: list[EdgeFinding]) -> Table:
    table = section("\nEdges", "edge", "connector", "source")
    for edge in edges:
        extra = f" {json.dumps(edge.extra, default=str)}" if edge.extra and not edge.routes else ""
        table.add_row(f"  {edge.edge}", (edge.connector or "–") + extra, Text(edge.source, "dim"))
        for route in edge.routes:
            values = ", ".join(f"{name} {_number(value)}" for name, value in route.values.items())
            table.add_row(Text(f"    {route.name or 'default'}", "dim"), f"{route.carries}: {values}", "")
    return table


def _number(value: Any) -> str:
    """Return a value with its digits grouped."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _stages_verdict(found: StagesDiagnosis) -> RenderableType:
    if found.problems:
        return problems_table("\nCannot serve the stages", found.problems)
    if not found.active:
        return Text(f"\nThe stage scheduler is off: {found.file} has no key {KEY!r}, or it is false.")
    return Text("\nThe stage scheduler is on.")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    additional_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Check these options too: the value you give to vllm serve --additional-config.",
        ),
    ] = None,
    stages: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Check the options of the stage scheduler too: the deploy YAML that you give to vllm serve --omni "
            f"--deploy-config, or a file of these options alone. Default: the file that {VARIABLE} names, if set.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="With --stages: the model that is served, where the deploy YAML names no pipeline."),
    ] = None,
) -> None:
    """Report on one screen what is installed, which features are active and why, and what prevents vLLM from starting.

    Exit status: 0 if vllm serve can start with our scheduler, and with the given stages; 1 if it cannot.
    """
    if stages is None and os.environ.get(VARIABLE):
        stages = Path(os.environ[VARIABLE])
    if model is not None and stages is None:
        raise typer.BadParameter(
            "--model is used only with --stages; pass --stages too, or remove --model", param_hint="--model"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # importing vLLM logs to stdout, where the findings go
    waiting = Console(stderr=True).status("Importing vLLM ...")
    with waiting, contextlib.redirect_stdout(sys.stderr):
        findings = diagnose(_parsed(additional_config))
        if stages is not None:
            findings = dataclasses.replace(findings, stages=diagnose_stages(stages, model))
    if as_json:
        typer.echo(json.dumps(findings.as_dict(), indent=2))
    else:
        page_console().print(screen(findings, with_options=additional_config is not None))
    raise typer.Exit(0 if findings.ok else 1)


def screen(findings: Diagnosis, *, with_options: bool = False) -> RenderableType:
    """Return the findings as one page: versions, options if given, features, video, devices, extension points, verdict,
    and stages if given.
    """
    parts: list[RenderableType] = [_versions(findings)]
    if with_options and findings.options:
        parts.append(options_table("\nOptions", findings.options))
    if findings.features:
        parts.append(statuses_table("\nFeatures", findings.features))
    parts.append(statuses_table("\nVideo loader omni_flashcodec", findings.video))
    if findings.devices:
        parts.append(statuses_table("\nMetrics of devices", findings.devices))
    if findings.probes:
        parts.append(_probes(findings))
    parts.append(_verdict(findings))
    if findings.stages is not None:
        parts += stage_parts(findings.stages)
    return Group(*parts)


def _parsed(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        written = json.dumps({KEY: text}) if _NAME.fullmatch(text) else '{"omni_sched": {...}}'
        raise typer.BadParameter(
            f"the value is not JSON: {error}; write it as '{written}'", param_hint="--additional-config"
        ) from None


def _versions(findings: Diagnosis) -> Table:
    table = section("Versions", "part", "version", "note")
    for found in findings.versions:
        table.add_row(f"  {found.name}", found.version or Text("not installed", "dim"), Text(found.note, "dim"))
    return table


def _probes(findings: Diagnosis) -> Table:
    table = section("\nExtension points of vLLM", "mark", "symbol", "what")
    for probe in {probe.symbol: probe for probe in findings.probes}.values():
        mark = YES if probe.available else NO if probe.reason == "missing" else ABSENT
        symbol = _short(probe.symbol) if probe.reason != "missing" else probe.symbol
        note = probe.name if probe.available else f"{probe.name}: {probe.reason}"
        table.add_row(Text("  ") + mark, symbol, Text(note, "dim"))
    return table


def _short(symbol: str) -> str:
    """Return class and method, or the function; ``--json`` has the full path."""
    parts = symbol.split(".")
    return ".".join(parts[-2:] if parts[-2][:1].isupper() else parts[-1:])


def _verdict(findings: Diagnosis) -> RenderableType:
    if not findings.problems:
        active = sum(status.active for status in findings.features)
        return Text(f"\n{active} of {len(findings.features)} features active. Serve with:\n").append(
            "  vllm serve MODEL --scheduler-cls vllm_omni_sched.OmniScheduler", "bold"
        )
    return problems_table("\nCannot serve with vllm_omni_sched.OmniScheduler", findings.problems)

"""``vllm-omni-sched doctor``: reports whether our scheduler works here, with which features, and otherwise why not."""

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_omni_sched.cli.diagnosis import Diagnosis, diagnose
from vllm_omni_sched.cli.doctor_tables import ABSENT, NO, YES, options_table, problems_table, section, statuses_table
from vllm_omni_sched.cli.stage_diagnosis import diagnose_stages
from vllm_omni_sched.cli.stage_view import stage_parts
from vllm_omni_sched.stage_config import VARIABLE


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
            "it is used with --stages only; give that too, or leave --model out", param_hint="--model"
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
        Console(highlight=False).print(screen(findings, with_options=additional_config is not None))
    raise typer.Exit(0 if findings.ok else 1)


def screen(findings: Diagnosis, *, with_options: bool = False) -> RenderableType:
    """Return the findings as one page: versions, options if given, features, video, extension points, verdict, and
    stages if given.
    """
    parts: list[RenderableType] = [_versions(findings)]
    if with_options and findings.options:
        parts.append(options_table("\nOptions", findings.options))
    if findings.features:
        parts.append(statuses_table("\nFeatures", findings.features))
    parts.append(statuses_table("\nVideo loader omni_flashcodec", findings.video))
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
        raise typer.BadParameter(f"not JSON: {error}", param_hint="--additional-config") from None


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

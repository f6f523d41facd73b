"""``vllm-omni-sched simulate``: simulates a scenario, or a study of many, on a cluster of any size."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_omni_sched.cli import simulate_view
from vllm_omni_sched.cli.console import INTERRUPTED, PROBLEM, USAGE, leave, page_console
from vllm_omni_sched.config.errors import ConfigError

if TYPE_CHECKING:
    from vllm_omni_sched.sim.measure import Run
    from vllm_omni_sched.sim.output import Spans
    from vllm_omni_sched.sim.study.evaluate import Finding
    from vllm_omni_sched.sim.study.plan import Study

_leave = partial(leave, "simulate")


def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A scenario, as TOML.", show_default=False)],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override a value of the file, in every variant and case, such as stages.llm.replicas=4.",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Override the file's seed.", show_default=False)] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the findings into this folder, as JSON.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.", show_default=False)
    ] = None,
    trace_seconds: Annotated[float, typer.Option(help="Simulated seconds that the trace covers.")] = 60.0,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Points of a study at once.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Simulate a scenario with the real policies: latencies, goodput, utilisation, device hours.

    Ctrl-C keeps the points of a study that are done. Exit status: 0 on success, 1 if a point failed, 2 if the file or
    an argument is invalid, 130 if it was interrupted.
    """
    if not trace_seconds > 0:
        _leave(USAGE, f"--trace-seconds must be positive, got {trace_seconds:g}")
    # imported late: these modules need numpy
    from vllm_omni_sched.sim.output import Spans
    from vllm_omni_sched.sim.study.plan import load_study

    try:
        study = load_study(scenario, _overrides(set_ or [], seed))
    except ConfigError as error:
        _leave(USAGE, str(error))
    if trace is not None and not study.single:
        _leave(USAGE, f"--trace is of one run, and {scenario.name} asks for {_many(study)}")
    spans = Spans(trace_seconds) if trace is not None else None
    try:
        findings, interrupted = _findings(study, jobs, spans, quiet=quiet or as_json)
        if interrupted and not findings:
            raise KeyboardInterrupt
        body = _written(study, findings, interrupted, out, trace, spans)
    except KeyboardInterrupt:
        _leave(INTERRUPTED, "interrupted; no file is half-written")
    except OSError as error:
        _leave(USAGE, f"{error.filename or out or trace}: {error.strerror or error}")
    if as_json:
        typer.echo(json.dumps(body, indent=2))
    else:
        page_console().print(simulate_view.screen(study, findings))
    for finding in (wrong := [finding for finding in findings if finding.error]):
        typer.echo(f"vllm-omni-sched simulate: {finding.label}: {finding.error}", err=True)
    if interrupted:
        kept = "" if out is None else f"; they are in {out}"
        _leave(INTERRUPTED, f"interrupted after {len(findings)} of {len(study.points)} points{kept}")
    if wrong:
        raise typer.Exit(PROBLEM)


def runner() -> Run:
    """Return the function that simulates one scenario."""
    run: Run = import_module("vllm_omni_sched.sim.run").simulate
    return run


def _findings(study: Study, jobs: int, spans: Spans | None, quiet: bool) -> tuple[list[Finding], bool]:
    """Return the findings in the order of the points, and whether Ctrl-C ended the study."""
    from vllm_omni_sched.sim.study.running import run_study

    with simulate_view.Bar(study, quiet) as bar:
        found, interrupted = [], False
        try:
            for finding in run_study(study, runner(), jobs, bar.progress, spans):
                bar.done(finding)
                found.append(finding)
        except KeyboardInterrupt:
            interrupted = True
    order = {(point.label, point.seed): at for at, point in enumerate(study.points)}
    return sorted(found, key=lambda finding: order[finding.label, finding.seed]), interrupted


def _written(
    study: Study,
    findings: Sequence[Finding],
    interrupted: bool,
    out: Path | None,
    trace: Path | None,
    spans: Spans | None,
) -> dict[str, Any]:
    from vllm_omni_sched.sim.study import report

    body = report.report(study, findings, ["vllm-omni-sched", *sys.argv[1:]], interrupted)
    if out is not None:
        stem = re.sub(r"[^a-z0-9]+", "-", study.base.name.lower()).strip("-") or "scenario"
        report.write(out / f"{stem}.json", body)
    if trace is not None and spans is not None:
        spans.write(trace)
        if spans.dropped:
            typer.echo(
                f"vllm-omni-sched simulate: the trace is full: {spans.dropped} events are not in it; "
                "lower --trace-seconds",
                err=True,
            )
    return body


def _overrides(given: Sequence[str], seed: int | None) -> dict[str, Any]:
    """Parse dotted keys with TOML values; text that is not TOML is taken as a string."""
    from vllm_omni_sched.sim.scenario.loader import value_of

    overrides: dict[str, Any] = {}
    for word in given:
        key, equals, text = word.partition("=")
        if not equals or not key.strip():
            _leave(USAGE, f"--set {word}: write it as KEY=VALUE, such as stages.llm.replicas=4")
        overrides[key.strip()] = value_of(text.strip())
    return overrides | ({"seed": seed} if seed is not None else {})


def _many(study: Study) -> str:
    return f"{len(study.points)} points" if study.search is None else f"a search ({study.search.kind})"

"""``vllm-omni-sched import``: turns a trace of others into one for the simulator."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from vllm_omni_sched.cli.console import USAGE, leave
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.importers import TraceFormat, import_trace
from vllm_omni_sched.sim.workloads.trace import write_trace

_leave = partial(leave, "import")


def import_(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the trace here.", show_default=False)],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The trace, unpacked.", show_default=False)],
    format: Annotated[TraceFormat, typer.Option("--format", help="Who wrote it.", show_default=False)],
    image_embeds: Annotated[
        int,
        typer.Option(min=0, help="Prompt tokens of an image, for traces that count images; 0: prompts are all text."),
    ] = 0,
) -> None:
    """Turn a public trace, or the result of a benchmark client, into a trace of requests for the simulator.

    Formats: Mooncake, Azure's LLM and multimodal traces, BurstGPT, detailed results of vllm bench serve, and AIPerf's
    profile_export.jsonl. Exit status: 0 on success; 2 if the file or an argument is invalid.
    """
    if out.exists():
        _leave(USAGE, f"{out} exists already: choose another name, or delete it")
    try:
        found = import_trace(file, format, image_embeds)
    except ConfigError as error:
        _leave(USAGE, str(error))
    try:
        write_trace(out, found.trace.header, found.trace.requests)
    except OSError as error:
        _leave(USAGE, f"--out {out}: {error.strerror or error}")
    requests, seconds = len(found.trace.requests), found.trace.requests[-1].at
    left_out = f"; {found.left_out} without output left out" if found.left_out else ""
    typer.echo(f"{requests} requests over {seconds:,.0f} s in {out}{left_out}")

"""``vllm-omni-sched import``: turns a trace of others into one for the simulator, or into statistics."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from vllm_omni_sched.cli.console import PROBLEM, USAGE, leave
from vllm_omni_sched.cli.metrics_page import look, metrics_address, why
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.importers import TraceFormat, import_trace
from vllm_omni_sched.sim.workloads.recorder import STARTED, Scrape, read_metrics
from vllm_omni_sched.sim.workloads.statistics import import_statistics, write_statistics
from vllm_omni_sched.sim.workloads.trace import write_trace

_leave = partial(leave, "import")


def import_(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the trace here.", show_default=False)],
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The trace, unpacked.", show_default=False)
    ] = None,
    format: Annotated[TraceFormat | None, typer.Option("--format", help="Who wrote it.", show_default=False)] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL|FILE",
            help="Instead of a trace: a vLLM server, or its /metrics in a file; twice for the time between two files.",
            show_default=False,
        ),
    ] = None,
    over: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="With --metrics: the time that the counters cover, if they do not say.",
            show_default=False,
        ),
    ] = 0.0,
    seconds: Annotated[float, typer.Option(help="With --metrics: length of the trace.")] = 3600.0,
    image_embeds: Annotated[
        int,
        typer.Option(min=0, help="Prompt tokens of an image, for traces that count images; 0: prompts are all text."),
    ] = 0,
    statistics: Annotated[
        bool,
        typer.Option("--statistics", help="Write statistics of its clients, which have no request, and not a trace."),
    ] = False,
    licence: Annotated[
        str, typer.Option(metavar="TEXT", help="Name the licence of the trace in the statistics.", show_default=False)
    ] = "",
) -> None:
    """Turn a public trace, or the result of a benchmark client, into a trace of requests for the simulator.

    Formats: Mooncake, Azure's LLM and multimodal traces, BurstGPT, detailed results of vllm bench serve, and AIPerf's
    profile_export.jsonl. With --statistics, also the clients of ServeGen: name the folder of a category. With --metrics
    the load of a running vLLM server, as its counters have it. Exit status: 0 on success; 1 if the server does not
    answer; 2 if the file or an argument is invalid.
    """
    if metrics:
        if file is not None or format is not None or statistics or image_embeds:
            _leave(USAGE, "--metrics takes the place of a trace: leave out the file and what describes it")
        _import_metrics(metrics, over, seconds, out)
        return
    if file is None or format is None:
        _leave(USAGE, "name a trace and its --format, or a server with --metrics")
    if licence and not statistics:
        _leave(USAGE, "--licence is kept in statistics alone: add --statistics, or leave it out")
    if out.exists():
        _leave(USAGE, f"{out} exists already: choose another name, or delete it")
    if statistics:
        _write_statistics(file, format, out, image_embeds, licence)
        return
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


def _import_metrics(pages: list[str], over: float, seconds: float, out: Path) -> None:
    from vllm_omni_sched.sim.workloads.snapshot import UNKNOWN, snapshot

    if len(pages) > 2:
        _leave(USAGE, f"--metrics: at most two pages, of which the second is later, got {len(pages)}")
    if not 0 < seconds < float("inf") or not 0 <= over < float("inf"):
        _leave(USAGE, "--seconds must be above 0, and --over 0 or more")
    if out.exists():
        _leave(USAGE, f"{out} exists already: choose another name, or delete it")
    looks = [_page(one) for one in pages]
    (last, at), first = looks[-1], looks[0] if len(looks) > 1 else None
    begin = last.values.get(STARTED) if first is None else first[1]
    covered = over or (0.0 if begin is None else at - begin)
    what = urlsplit(pages[-1]).hostname or Path(pages[-1]).name
    try:
        found = snapshot(last, None if first is None else first[0], covered, seconds, f"/metrics of {what}")
        write_trace(out, found.trace.header, found.trace.intervals)
    except ConfigError as error:
        _leave(USAGE, f"--metrics {pages[-1]}: {error}")
    except OSError as error:
        _leave(USAGE, f"--out {out}: {error.strerror or error}")
    arrivals = found.trace.intervals[0].arrivals
    typer.echo(f"{arrivals} requests in {seconds:g} s in {out}, drawn at each replay: {found.rate:.3g} a second, the "
               f"mean over {covered:,.0f} s")  # fmt: skip
    typer.echo("The counters do not tell:")
    for one in UNKNOWN:
        typer.echo(f"- {one}")
    if found.cached is not None:
        typer.echo(f"The server's prefix cache had {found.cached:.0%} of the prompt tokens: a plan without it is safe, "
                   "but larger.")  # fmt: skip
    if found.acceptance is not None:
        typer.echo(f"It accepted {found.acceptance:.0%} of its first draft tokens: plan with --speculation "
                   f"...,acceptance={found.acceptance:.2g}.")  # fmt: skip


def _page(where: str) -> tuple[Scrape, float]:
    """Return a page of metrics, and when it was taken, in seconds since 1970."""
    if not where.startswith(("http://", "https://")):
        try:
            text, at = Path(where).read_text(encoding="utf-8", errors="replace"), Path(where).stat().st_mtime
            return read_metrics(text), at
        except OSError as error:
            _leave(USAGE, f"--metrics {where}: {error.strerror or error}")
        except ConfigError as error:
            _leave(USAGE, f"--metrics {where}: {error}")
    try:
        address = metrics_address(where)
    except ConfigError as error:
        _leave(USAGE, f"--metrics: {error}")
    try:
        return look(address), datetime.now(timezone.utc).timestamp()
    except (OSError, HTTPException, ConfigError) as error:
        _leave(PROBLEM, f"{address}: {why(error)}")


def _write_statistics(file: Path, format: TraceFormat, out: Path, image_embeds: int, licence: str) -> None:
    try:
        found = import_statistics(file, format, image_embeds, licence)
        write_statistics(out, found)
    except ConfigError as error:
        _leave(USAGE, str(error))
    except OSError as error:
        _leave(USAGE, f"--out {out}: {error.strerror or error}")
    clients = f"{len(found.clients)} client{'s' if len(found.clients) > 1 else ''}"
    typer.echo(f"{clients} with {found.rate:.3g} requests a second in {out}")

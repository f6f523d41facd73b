"""``vllm-omni-sched record``: records the load of a running vLLM server as a trace for the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from vllm_omni_sched.cli.console import PROBLEM, USAGE, leave, progress_bar
from vllm_omni_sched.cli.metrics_page import look as look_at
from vllm_omni_sched.cli.metrics_page import metrics_address, why
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import ConfigError

if TYPE_CHECKING:
    from vllm_omni_sched.sim.workloads.recorder import Scrape
    from vllm_omni_sched.sim.workloads.trace import TraceWriter

_PATIENCE = 3  # failed scrapes in a row after which recording ends
_LEAST_SECONDS = 0.1

_leave = partial(leave, "record")


def record(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A vLLM server, as http://localhost:8000.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the trace here.", show_default=False)],
    seconds: Annotated[float, typer.Option(help="How long to record, in seconds.", show_default=False)],
    interval: Annotated[float, typer.Option(help="Seconds between scrapes of the metrics.")] = 10.0,
) -> None:
    """Record how many requests a server gets, and how many tokens they have, from its metrics; no content is recorded.

    Recording ends early with Ctrl-C, or when the server does not answer three times in a row; the trace until then is
    kept. Exit status: 0 on success, also after Ctrl-C; 1 if the server stopped answering, or nothing was recorded; 2 if
    an argument is invalid.
    """
    if not all(_LEAST_SECONDS <= length < math.inf for length in (seconds, interval)):
        _leave(USAGE, f"--seconds and --interval must be {_LEAST_SECONDS:g} or more")
    try:
        address = metrics_address(url)
    except ConfigError as error:
        _leave(USAGE, str(error))
    if out.exists():
        _leave(USAGE, f"{out} exists already: choose another name, or delete it")
    from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Header, TraceWriter

    try:
        first = look_at(address)
    except (OSError, HTTPException, ConfigError) as error:
        _leave(PROBLEM, f"{address}: {why(error)}")
    header = Header(
        format=FORMAT,
        version=VERSION,
        interval_seconds=min(interval, seconds),
        source=f"vllm-omni-sched record, {urlsplit(address).hostname}",
        begins=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    try:
        writer = TraceWriter(out, header)
    except OSError as error:
        _leave(USAGE, f"--out {out}: {error.strerror or error}")
    gone, ended = None, False
    try:
        gone = _record(first, lambda: look_at(address), writer, seconds, interval)
    except KeyboardInterrupt:
        ended = True
    finally:
        kept = writer.close()
    how_much = f"{writer.lines} intervals in {out}" if kept else "nothing was recorded"
    if gone is not None:
        _leave(PROBLEM, f"{address}: {gone}; {how_much}")
    if not kept:
        _leave(PROBLEM, f"ended before the first interval of {interval:g} s was over; {how_much}")
    typer.echo(f"{'ended early: ' if ended else ''}{how_much}")


def _record(
    first: Scrape, look: Callable[[], Scrape], writer: TraceWriter, seconds: float, interval: float
) -> str | None:
    """Write intervals until the time is over; return why the server stopped answering, or None."""
    from vllm_omni_sched.sim.workloads.recorder import Recorder

    begin = monotonic_seconds()
    recorder = Recorder(first, begin)
    arrivals, failed, looks = 0, 0, math.ceil(seconds / interval - 1e-9)
    with progress_bar() as bar:
        task = bar.add_task("Recording", total=looks)
        for number in range(1, looks + 1):
            wait = begin + min(number * interval, seconds) - monotonic_seconds()
            if wait <= 0:  # the previous scrape took longer than an interval
                continue
            sleep_seconds(wait)
            try:
                scrape = look()
            except (OSError, HTTPException, ConfigError) as error:
                failed += 1
                bar.update(task, description=f"No answer, {failed} of {_PATIENCE}")
                if failed == _PATIENCE or number == looks:
                    return f"no answer to {failed} scrapes in a row: {why(error)}"
                continue
            failed = 0
            entry = recorder.interval(scrape, monotonic_seconds())
            writer.add(entry)
            arrivals += entry.arrivals
            bar.update(task, completed=number, description=f"{arrivals} requests")
    return None

"""``vllm-omni-sched top``: shows what a running server does, from its ``/metrics``."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from vllm_omni_sched.bounded_log import last_lines_of
from vllm_omni_sched.cli.console import HISTORY, PROBLEM, USAGE, leave, page_console
from vllm_omni_sched.cli.metrics_page import why
from vllm_omni_sched.cli.top_view import Shown, json_of, view_of
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds, wall_seconds
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.core.engine.history import DECISIONS
from vllm_omni_sched.core.engine.history_lines import HistoryLine, entry_of
from vllm_omni_sched.monitor.server_frame import frame_of
from vllm_omni_sched.monitor.server_page import ServerPage, read_page

ANSWER_SECONDS = 10.0
SHOWN_DECISIONS = 10
TAIL_BYTES = 64 << 10  # of the history, in which the latest decisions are looked for


class Unreadable(Exception):
    """Raised with one line that says why a server, or its history of requests, could not be read."""


class Watch:
    """Reads a server again and again, and compares each page with the oldest of the last ``window`` seconds.

    With a ``history``, each state also has the latest decisions in that file.
    """

    def __init__(self, url: str, window_seconds: float, history: Path | None = None) -> None:
        self._url, self._window, self._history = url, window_seconds, history
        self._pages: deque[ServerPage] = deque()

    def look(self) -> Shown:
        """Read the server, and return its state.

        Raises:
            Unreadable: it does not answer, or has no metrics of this package; or the history cannot be read.
        """
        page = read_server(self._url)
        decisions = None if self._history is None else read_decisions(self._history)
        pages = self._pages
        if pages and page.restarted_since(pages[-1]):
            pages.clear()
        while len(pages) > 1 and page.at - pages[1].at >= self._window:
            pages.popleft()
        earlier = pages[0] if pages else None
        pages.append(page)
        return Shown(frame_of(page, earlier), decisions)


def read_server(url: str) -> ServerPage:
    """Return the page of a server.

    Raises:
        Unreadable: it does not answer, or has no metrics of this package.
    """
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            text = answer.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        raise Unreadable(f"{url} answers with HTTP status {error.code}: is this a vLLM server?") from None
    except (OSError, http.client.HTTPException) as error:
        raise Unreadable(
            f"{url} cannot be read: {why(error)}; look whether the server runs, and whether this is its address and "
            "port (vllm serve --port, by default 8000)"
        ) from None
    try:
        page = read_page(text, monotonic_seconds())
    except ConfigError as error:
        raise Unreadable(f"{url} cannot be read: {error}") from None
    if not page.has_ours:
        raise Unreadable(
            f"{url} has no metrics of vllm-omni-sched: start the server with "
            "--scheduler-cls vllm_omni_sched.OmniScheduler, without --disable-log-stats and without metrics: false"
        )
    return page


def read_decisions(file: Path) -> tuple[HistoryLine, ...]:
    """Return the latest decisions in a history of requests, the oldest first.

    Raises:
        Unreadable: it cannot be read, or is no history.
    """
    try:
        lines = last_lines_of(file, TAIL_BYTES)
    except OSError as error:
        raise Unreadable(f"--history: {file} cannot be read: {error.strerror or error}; give {HISTORY}") from None
    entries = []
    for line in lines:
        with contextlib.suppress(ConfigError):
            entries.append(entry_of(line))
    if lines and not entries:
        raise Unreadable(f"--history: {file} is no history of requests; give {HISTORY}")
    return tuple([one for one in entries if one.transition in DECISIONS][-SHOWN_DECISIONS:])


def page_url(address: str) -> str:
    """Return the URL of the metrics of a server, of which the address may be given in short, as host:port.

    Raises:
        ValueError: it is not an address.
    """
    url = address if "://" in address else f"http://{address}"
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest.strip("/"):
        raise ValueError(f"{address!r} is not the address of a server, such as http://localhost:8000")
    url = url.rstrip("/")
    return url if url.endswith("/metrics") else f"{url.removesuffix('/v1')}/metrics"


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server, such as http://localhost:8000.", show_default=False)
    ],
    once: Annotated[bool, typer.Option("--once", help="Print one frame, with counts since the start.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each frame as a line of JSON.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between frames.")] = 2.0,
    window: Annotated[float, typer.Option(min=0.1, help="Seconds over which counts are shown.")] = 30.0,
    history: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Show the latest decisions about requests, too: the file that the option expert.history_path names.",
        ),
    ] = None,
) -> None:
    """Show the requests, lanes, encoder cache, SLO attainment and latest decisions of a running server.

    The first frame has the counts since the server started, later ones those of the last --window seconds.
    Exit status: 0 on success and after Ctrl-C; 1 if the server or the history cannot be read; 2 if an argument is
    invalid.
    """
    try:
        page = page_url(url)
    except ValueError as error:
        leave("top", USAGE, str(error))
    watch = Watch(page, window, history)
    try:
        shown = watch.look()
    except Unreadable as error:
        leave("top", PROBLEM, str(error))
    try:
        if as_json:
            _print_lines(watch, shown, interval, once=once)
        elif once:
            page_console().print(view_of(shown, url))
        else:
            _draw(watch, shown, interval, url)
    except KeyboardInterrupt:
        return


def _print_lines(watch: Watch, shown: Shown, interval: float, *, once: bool) -> None:
    while True:
        typer.echo(json.dumps(json_of(shown, wall_seconds())))
        if once:
            return
        sleep_seconds(interval)
        try:
            shown = watch.look()
        except Unreadable as error:
            leave("top", PROBLEM, str(error))


def _draw(watch: Watch, first: Shown, interval: float, url: str) -> None:
    """Draw frames until Ctrl-C: in place on a terminal, otherwise one after the other."""
    console = page_console()
    if not console.is_terminal:
        for shown, note in _states(watch, first, interval):
            console.print(view_of(shown, url, note))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for shown, note in _states(watch, first, interval):
            live.update(view_of(shown, url, note), refresh=True)


def _states(watch: Watch, shown: Shown, interval: float) -> Iterator[tuple[Shown, str]]:
    """Yield states for ever, with a note; a server that does not answer for some time is shown as it was."""
    note = ""
    while True:
        yield shown, note
        sleep_seconds(interval)
        try:
            shown, note = watch.look(), ""
        except Unreadable as error:
            note = f"as it was before: {error}"

"""Define the trace format: arrivals in numbers, without content and without ids.

A text file of JSON, one value a line. The first line is the header::

    {"format": "vllm-omni-sched trace", "version": 1, "interval_seconds": 10.0, "source": "...", "begins": "..."}

Then follow either lines of kind ``interval`` (as `vllm-omni-sched record` writes them: counts of a server between
two scrapes; a replay has the same rates and distributions, but draws each request), or lines of kind ``request``
(exact traces, such as a benchmark writes: a replay has exactly these requests). A file has one of the two, never both.

Intervals follow each other without gaps; requests are in order of time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from vllm_omni_sched.config.errors import ConfigError

FORMAT, VERSION = "vllm-omni-sched trace", 1
_TOUCH_SECONDS = 1e-3  # times are rounded to this


Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Length = Annotated[float, msgspec.Meta(gt=0)]
Bucket = tuple[Annotated[float, msgspec.Meta(gt=0)] | None, Count]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a trace.

    ``interval_seconds``: approximate length of intervals. ``source``: description of the recording. ``begins``: the
    wall
    time of second 0 as ISO 8601, empty if it is not known.
    """

    format: str
    version: int
    interval_seconds: Length = 1.0
    source: str = ""
    begins: str = ""


class Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A histogram of tokens of the requests that finished in an interval.

    ``buckets``: (most tokens, requests), rising, not cumulative; None for the last, which has no bound. ``total``:
    total tokens, 0 if not known.
    """

    buckets: tuple[Bucket, ...] = ()
    total: Seconds = 0.0

    @property
    def requests(self) -> int:
        """Return the requests in all buckets."""
        return sum(number for _, number in self.buckets)


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="interval"):
    """Counts of an interval from ``at`` of length ``seconds``.

    ``arrivals``: requests that arrived. The rest describes those that ``finished`` in it: their tokens, multimodal
    ``items`` by modality ("unknown" if the server does not tell), their ``classes``. ``max_tokens``: the allowed
    output. ``waiting``, ``running``: requests at its end. ``cv``: coefficient of variation of the gaps between
    arrivals, if known. ``restarted``: the server restarted in it, and earlier counts are lost.
    """

    at: Seconds
    seconds: Length
    arrivals: Count
    finished: Count = 0
    prompt_tokens: Tokens = Tokens()
    generation_tokens: Tokens = Tokens()
    max_tokens: Tokens = Tokens()
    items: dict[str, Count] = {}
    classes: dict[str, Count] = {}
    waiting: Count = 0
    running: Count = 0
    cv: Annotated[float, msgspec.Meta(gt=0, le=5)] | None = None
    restarted: bool = False


class Exact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="request"):
    """One request. ``items``: (modality, encoder embeddings) each; ``client``: a number that identifies the client."""

    at: Seconds
    text_tokens: Count
    output_tokens: Annotated[int, msgspec.Meta(ge=1)]
    items: tuple[tuple[str, Count], ...] = ()
    sla: str = "interactive"
    client: Count = 0


@dataclass(frozen=True)
class Trace:
    """A trace that was read: one of ``intervals`` and ``requests`` is empty."""

    header: Header
    intervals: tuple[Interval, ...] = ()
    requests: tuple[Exact, ...] = ()

    @property
    def seconds(self) -> float:
        """Return the seconds to the end of its last interval, or to a mean gap after its last request."""
        if self.intervals:
            return self.intervals[-1].at + self.intervals[-1].seconds
        return self.requests[-1].at * (1 + 1 / len(self.requests)) or self.header.interval_seconds

    @property
    def arrivals(self) -> int:
        """Return the number of all arrivals."""
        return len(self.requests) or sum(interval.arrivals for interval in self.intervals)


def read_trace(path: str | Path) -> Trace:
    """Return the trace in a file.

    Raises:
        ConfigError: it cannot be read, or a line of it is wrong: not JSON, cut off, of another version, with a key that
            is unknown, missing or out of range, out of order, or with a gap before it. The message names file and line.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error.strerror or error}") from None
    lines = data.split(b"\n")
    if lines[-1]:
        raise ConfigError(f"{path}, line {len(lines)}: the last line is incomplete: delete it, or copy the file again")
    header = _header(lines[0] if data else None, f"{path}, line 1")
    intervals: list[Interval] = []
    requests: list[Exact] = []
    for number, line in enumerate(lines[1:-1], 2):
        where = f"{path}, line {number}"
        entry = _decoded(_ENTRY, line, where)
        if requests if isinstance(entry, Interval) else intervals:
            raise ConfigError(f"{where}: a trace has intervals or requests, never both: split it into two files")
        if isinstance(entry, Interval):
            _check_interval(entry, intervals[-1] if intervals else None, where)
            intervals.append(entry)
        else:
            if requests and entry.at < requests[-1].at:
                raise ConfigError(
                    f"{where}: at is {entry.at:g}, before that of the line above, {requests[-1].at:g}: sort the lines"
                )
            requests.append(entry)
    trace = Trace(header, tuple(intervals), tuple(requests))
    if not trace.arrivals:
        raise ConfigError(f"{path}: the trace has no requests")
    return trace


_HEADER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Header)
_ENTRY: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Interval | Exact)
_ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()


def _header(line: bytes | None, where: str) -> Header:
    if line is None:
        raise ConfigError(f"{where}: the file is empty")
    found = _decoded(_ANY, line, where)
    if not isinstance(found, Mapping) or found.get("format") != FORMAT:
        raise ConfigError(f'{where}: not a trace: its first line must have "format": "{FORMAT}"')
    if found.get("version") != VERSION:
        raise ConfigError(
            f"{where}: version {found.get('version')!r} of the format is not supported; this release reads {VERSION}"
        )
    header: Header = _decoded(_HEADER, line, where)
    return header


def _decoded(decoder: msgspec.json.Decoder[Any], line: bytes, where: str) -> Any:
    try:
        return decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        what = "" if isinstance(error, msgspec.ValidationError) else "not JSON: "
        fix = ', which must be "interval" or "request"' if decoder is _ENTRY and "kind`" in str(error) else ""
        raise ConfigError(f"{where}: {what}{error}{fix}") from None


def _check_interval(entry: Interval, before: Interval | None, where: str) -> None:
    for name in ("prompt_tokens", "generation_tokens", "max_tokens"):
        bounds = [bound for bound, _ in getattr(entry, name).buckets]
        finite = [bound for bound in bounds if bound is not None]
        if None in bounds[:-1] or sorted(set(finite)) != finite:
            raise ConfigError(
                f"{where}: {name}: the bounds of buckets must rise, with null only for the last, got {bounds}"
            )
    if before is None:
        if entry.at > _TOUCH_SECONDS:
            raise ConfigError(f"{where}: the first interval must begin at 0, got {entry.at:g}")
        return
    end = before.at + before.seconds
    late = entry.at - end
    if late > _TOUCH_SECONDS:
        raise ConfigError(f"{where}: there is a gap of {late:g} s before it: fill it with an interval without arrivals")
    if late < -_TOUCH_SECONDS:
        raise ConfigError(
            f"{where}: at is {entry.at:g}, before {end:g}, where the previous interval ends: sort the lines"
        )


class TraceWriter:
    """Writes a trace to a temporary file, and moves it to its place when it is closed; whole lines only.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.lines = 0
        self._beside = path.with_name(f".{path.name}.{os.getpid()}.part")
        self._file: IO[bytes] = self._beside.open("wb")
        self._write(header)

    def add(self, entry: Interval | Exact) -> None:
        """Add a line."""
        self._write(entry)
        self.lines += 1

    def close(self) -> bool:
        """Move the file to its place unless it has only a header; return whether it is there."""
        self._file.close()
        if self.lines:
            self._beside.replace(self.path)
        else:
            self._beside.unlink()
        return bool(self.lines)

    def _write(self, entry: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()


def write_trace(path: Path, header: Header, entries: Iterable[Interval | Exact]) -> None:
    """Write a trace with these lines.

    Raises:
        OSError: the file cannot be written.
    """
    writer = TraceWriter(path, header)
    try:
        for entry in entries:
            writer.add(entry)
    finally:
        writer.close()

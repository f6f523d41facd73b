"""Read traces of others: requests with their arrival times and token counts."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, Trace


class TraceFormat(str, Enum):
    """Format of a trace or result that others write."""

    MOONCAKE = "mooncake"
    AZURE = "azure"
    BURSTGPT = "burstgpt"
    VLLM_BENCH = "vllm-bench"
    AIPERF = "aiperf"


@dataclass(frozen=True)
class Imported:
    """A trace of exact requests from 0 on, and the number of failed requests that were left out."""

    trace: Trace
    left_out: int


@dataclass(frozen=True)
class _Row:
    """A request as its file has it. ``where``: its place in the file, for messages."""

    where: str
    at: float
    tokens: int
    output: int
    images: int = 0


def import_trace(path: Path, format: TraceFormat, image_embeds: int = 0) -> Imported:
    """Read a file of this format as a trace of exact requests.

    1. Requests are sorted by time, and the first is at 0.
    2. A request without output tokens has failed, or was cancelled; it is left out and counted.
    3. Prompt tokens include those of images, as far as they suffice for them (Azure's multimodal trace names the number
       of images alone): each image takes ``image_embeds`` of them. With ``image_embeds`` 0 all tokens are text.
    4. Contents are not read, and equal prefixes are not modelled: Mooncake's hash ids are ignored.

    The formats: Mooncake's traces (arXiv 2407.00079; JSON lines, times in ms), Azure's LLM traces of 2023 and 2024 and
    its multimodal one of 2025 (CSV), BurstGPT (arXiv 2401.17644; CSV, times in s), ``vllm bench serve --save-result
    --save-detailed`` (JSON), AIPerf's ``profile_export.jsonl``.

    Raises:
        ConfigError: the file cannot be read, is not of this format, or has no request; the message names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file: unpack it first") from None
    rows, fields = list(_READERS[format](text, str(path))), _FIELDS[format]
    fix = f": {fields.unit} are expected; correct the line, or delete it"
    for row in rows:
        if not math.isfinite(row.at):
            raise ConfigError(f"{row.where}: {fields.time} is {row.at}, which is not a number{fix}")
        if abs(row.at) > _LATEST_SECONDS:
            raise ConfigError(f"{row.where}: {fields.time} is {row.at:.3g} s, which is no time of a request{fix}")
    kept = sorted((row for row in rows if row.output), key=lambda row: row.at)
    for row in kept:
        if not row.tokens:
            raise ConfigError(f"{row.where}: {fields.prompt} is 0, and vLLM refuses empty prompts: delete the request")
    if not kept:
        raise ConfigError(f"{path}: no request with output tokens in it")
    begin = kept[0].at
    header = Header(FORMAT, VERSION, source=f"{path.name}, imported as {format.value}")
    requests = tuple(_request(row, row.at - begin, image_embeds) for row in kept)
    return Imported(Trace(header, requests=requests), len(rows) - len(kept))


class _Fields(NamedTuple):
    """Names what a format calls the time of a request, and the tokens of its prompt and of its output.

    ``unit``: of the time, for messages.
    """

    time: str
    prompt: str
    output: str
    unit: str

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names, which are the columns of a CSV file."""
        return self.time, self.prompt, self.output

    def tokens(self, row: Mapping[str, Any], where: str) -> tuple[int, int]:
        """Return the tokens of the prompt and of the output in a row, each in any spelling of a whole number.

        Raises:
            ConfigError: one of them is none; the message names it.
        """
        return _whole(row[self.prompt], self.prompt, where), _whole(row[self.output], self.output, where)


_FIELDS: Mapping[TraceFormat, _Fields] = {
    TraceFormat.MOONCAKE: _Fields("timestamp", "input_length", "output_length", "milliseconds since the start"),
    TraceFormat.AZURE: _Fields("TIMESTAMP", "ContextTokens", "GeneratedTokens", "times like 2023-11-16 18:15:46.68"),
    TraceFormat.BURSTGPT: _Fields("Timestamp", "Request tokens", "Response tokens", "seconds since the start"),
    TraceFormat.VLLM_BENCH: _Fields("start_times", "input_lens", "output_lens", "seconds of a clock"),
    TraceFormat.AIPERF: _Fields(
        "request_start_ns", "input_sequence_length", "output_sequence_length", "nanoseconds of a clock"
    ),
}
_IMAGES = "NumImages"  # a column of Azure's multimodal trace alone


def _request(row: _Row, at: float, image_embeds: int) -> Exact:
    images = min(row.images, row.tokens // image_embeds) if image_embeds else 0
    items = (("image", image_embeds),) * images
    return Exact(at, row.tokens - images * image_embeds, row.output, items)


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: Any
    output_length: Any


def _mooncake(text: str, path: str) -> Iterator[_Row]:
    fields = _FIELDS[TraceFormat.MOONCAKE]
    for where, row in _json_lines(text, path, _Mooncake):
        tokens = _whole(row.input_length, fields.prompt, where)
        output = _whole(row.output_length, fields.output, where)
        yield _Row(where, row.timestamp / 1e3, tokens, output)


def _azure(text: str, path: str) -> Iterator[_Row]:
    fields = _FIELDS[TraceFormat.AZURE]
    for where, row in _csv(text, path, fields.names):
        at = _time(row[fields.time], fields.time, where)
        images = _whole(row.get(_IMAGES, "0"), _IMAGES, where)
        yield _Row(where, at, *fields.tokens(row, where), images)


def _burstgpt(text: str, path: str) -> Iterator[_Row]:
    fields = _FIELDS[TraceFormat.BURSTGPT]
    for where, row in _csv(text, path, fields.names):
        try:
            at = float(row[fields.time])
        except ValueError:
            raise ConfigError(f"{where}: {fields.time} must be a number of seconds, got {row[fields.time]!r}") from None
        yield _Row(where, at, *fields.tokens(row, where))


class _VllmBench(msgspec.Struct):
    start_times: list[float]
    input_lens: list[Any]
    output_lens: list[Any]


def _vllm_bench(text: str, path: str) -> Iterator[_Row]:
    try:
        found = msgspec.json.decode(text, type=_VllmBench)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}: run vllm bench serve with --save-result --save-detailed") from None
    lengths = {len(found.start_times), len(found.input_lens), len(found.output_lens)}
    fields = _FIELDS[TraceFormat.VLLM_BENCH]
    if len(lengths) > 1:
        raise ConfigError(f"{path}: {fields.time}, {fields.prompt} and {fields.output} must have the same length")
    columns = zip(found.start_times, found.input_lens, found.output_lens, strict=True)
    for number, (at, tokens, output) in enumerate(columns):
        where = f"{path}, request {number}"
        yield _Row(where, at, _whole(tokens, fields.prompt, where), _whole(output, fields.output, where))


class _Value(msgspec.Struct):
    value: Any


class _Metrics(msgspec.Struct):
    input_sequence_length: _Value | None = None
    output_sequence_length: _Value | None = None


class _Metadata(msgspec.Struct):
    request_start_ns: int


class _Aiperf(msgspec.Struct):
    metadata: _Metadata
    metrics: _Metrics


def _aiperf(text: str, path: str) -> Iterator[_Row]:
    fields = _FIELDS[TraceFormat.AIPERF]
    for where, row in _json_lines(text, path, _Aiperf):
        tokens, output = row.metrics.input_sequence_length, row.metrics.output_sequence_length
        at = row.metadata.request_start_ns / 1e9
        if tokens is None or output is None:
            yield _Row(where, at, 0, 0)
            continue
        of_prompt = _whole(tokens.value, fields.prompt, where)
        yield _Row(where, at, of_prompt, _whole(output.value, fields.output, where))


_LATEST_SECONDS = 1e11
"""Times beyond this, three thousand years, are mistakes; seconds since 1970 are far below."""
_MOST_TOKENS = 10**9


_READERS: Mapping[TraceFormat, Callable[[str, str], Iterator[_Row]]] = {
    TraceFormat.MOONCAKE: _mooncake,
    TraceFormat.AZURE: _azure,
    TraceFormat.BURSTGPT: _burstgpt,
    TraceFormat.VLLM_BENCH: _vllm_bench,
    TraceFormat.AIPERF: _aiperf,
}


def _json_lines(text: str, path: str, of: Any) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) of each line that is not empty."""
    decoder = msgspec.json.Decoder(of)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            yield where, decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{where}: {error}") from None


def _csv(text: str, path: str, columns: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield (place, row) of each line after the header, which must name these columns."""
    reader = csv.DictReader(io.StringIO(text))
    if missing := [name for name in columns if name not in (reader.fieldnames or ())]:
        raise ConfigError(f"{path}, line 1: the column {missing[0]!r} is missing: is it a trace of this format?")
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        if any(row[name] is None for name in columns):
            raise ConfigError(f"{where}: the line is incomplete")
        yield where, row


def _whole(value: Any, name: str, where: str) -> int:
    """Return a whole number in any spelling: 5, 5.0 and "5" are 5."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number.is_integer() or not 0 <= number <= _MOST_TOKENS:
        raise ConfigError(f"{where}: {name} must be a whole number from 0 to {_MOST_TOKENS:,}, got {value!r}")
    return int(number)


def _time(text: str, name: str, where: str) -> float:
    """Return the seconds of a time such as 2023-11-16 18:15:46.6805900, whose digits beyond microseconds are cut."""
    whole, _, rest = text.strip().partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    fraction, zone = rest[:digits], rest[digits:]
    try:
        moment = datetime.fromisoformat(whole + (f".{fraction[:6].ljust(6, '0')}" if fraction else "") + zone)
    except ValueError:
        raise ConfigError(f"{where}: {name} must be like 2023-11-16 18:15:46.68, got {text!r}") from None
    return moment.timestamp() if moment.tzinfo else moment.replace(tzinfo=timezone.utc).timestamp()

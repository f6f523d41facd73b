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
from typing import Any

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
    SERVEGEN = "servegen"


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
    blocks: tuple[int, ...] = ()


def import_trace(path: Path, format: TraceFormat, image_embeds: int = 0) -> Imported:
    """Read a file of this format as a trace of exact requests.

    1. Requests are sorted by time, and the first is at 0.
    2. A request without output tokens has failed, or was cancelled; it is left out and counted.
    3. Prompt tokens include those of images, as far as they suffice for them (Azure's multimodal trace names the number
       of images alone): each image takes ``image_embeds`` of them. With ``image_embeds`` 0 all tokens are text.
    4. Contents are not read. Mooncake's hash ids tell which prefixes are equal: blocks of 512 tokens.

    The formats: Mooncake's traces (arXiv 2407.00079; JSON lines, times in ms), Azure's LLM traces of 2023 and 2024 and
    its multimodal one of 2025 (CSV), BurstGPT (arXiv 2401.17644; CSV, times in s), ``vllm bench serve --save-result
    --save-detailed`` (JSON), AIPerf's ``profile_export.jsonl``.

    Raises:
        ConfigError: the file cannot be read, is not of this format, or has no request; the message names the line. Or
            the format has no requests: ServeGen publishes statistics of clients.
    """
    if format not in _READERS:
        raise ConfigError(
            f"{path}: {format.value} has statistics of clients and no requests: import it with --statistics"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file: unpack it first") from None
    rows = list(_READERS[format](text, str(path)))
    for row in rows:
        if not math.isfinite(row.at):
            raise ConfigError(f"{row.where}: the time is {row.at}, which is not a number")
        if min(row.tokens, row.output, row.images) < 0:
            raise ConfigError(f"{row.where}: tokens and images must be 0 or more")
    kept = sorted((row for row in rows if row.output), key=lambda row: row.at)
    if not kept:
        raise ConfigError(f"{path}: no request with output tokens in it")
    begin = kept[0].at
    block_tokens = _MOONCAKE_BLOCK if any(row.blocks for row in kept) else 0
    header = Header(FORMAT, VERSION, source=f"{path.name}, imported as {format.value}", block_tokens=block_tokens)
    requests = tuple(_request(row, row.at - begin, image_embeds) for row in kept)
    return Imported(Trace(header, requests=requests), len(rows) - len(kept))


def _request(row: _Row, at: float, image_embeds: int) -> Exact:
    images = min(row.images, row.tokens // image_embeds) if image_embeds else 0
    items = (("image", image_embeds),) * images
    return Exact(at, row.tokens - images * image_embeds, row.output, items, blocks=row.blocks)


_MOONCAKE_BLOCK = 512
"""Tokens of a block of Mooncake's traces, by their authors."""


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _mooncake(text: str, path: str) -> Iterator[_Row]:
    for where, row in _json_lines(text, path, _Mooncake):
        most = -(-row.input_length // _MOONCAKE_BLOCK)
        if len(row.hash_ids) > most:
            raise ConfigError(
                f"{where}: hash_ids has {len(row.hash_ids)} blocks of {_MOONCAKE_BLOCK} tokens, more than the "
                f"input_length of {row.input_length} has"
            )
        yield _Row(where, row.timestamp / 1e3, row.input_length, row.output_length, blocks=row.hash_ids)


def _azure(text: str, path: str) -> Iterator[_Row]:
    for where, row in _csv(text, path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        at = _time(row["TIMESTAMP"], where)
        images = _number_of({"NumImages": "0", **row}, "NumImages", where)
        yield _Row(
            where, at, _number_of(row, "ContextTokens", where), _number_of(row, "GeneratedTokens", where), images
        )


def _burstgpt(text: str, path: str) -> Iterator[_Row]:
    for where, row in _csv(text, path, ("Timestamp", "Request tokens", "Response tokens")):
        try:
            at = float(row["Timestamp"])
        except ValueError:
            raise ConfigError(f"{where}: Timestamp must be a number of seconds, got {row['Timestamp']!r}") from None
        yield _Row(where, at, _number_of(row, "Request tokens", where), _number_of(row, "Response tokens", where))


class _VllmBench(msgspec.Struct):
    start_times: list[float]
    input_lens: list[int]
    output_lens: list[int]


def _vllm_bench(text: str, path: str) -> Iterator[_Row]:
    try:
        found = msgspec.json.decode(text, type=_VllmBench)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}: run vllm bench serve with --save-result --save-detailed") from None
    lengths = {len(found.start_times), len(found.input_lens), len(found.output_lens)}
    if len(lengths) > 1:
        raise ConfigError(f"{path}: start_times, input_lens and output_lens must have the same length")
    columns = zip(found.start_times, found.input_lens, found.output_lens, strict=True)
    for number, (at, tokens, output) in enumerate(columns):
        yield _Row(f"{path}, request {number}", at, tokens, output)


class _Value(msgspec.Struct):
    value: float


class _Metrics(msgspec.Struct):
    input_sequence_length: _Value | None = None
    output_sequence_length: _Value | None = None


class _Metadata(msgspec.Struct):
    request_start_ns: int


class _Aiperf(msgspec.Struct):
    metadata: _Metadata
    metrics: _Metrics


def _aiperf(text: str, path: str) -> Iterator[_Row]:
    for where, row in _json_lines(text, path, _Aiperf):
        tokens, output = row.metrics.input_sequence_length, row.metrics.output_sequence_length
        failed = tokens is None or output is None
        yield _Row(
            where,
            row.metadata.request_start_ns / 1e9,
            0 if tokens is None else int(tokens.value),
            0 if failed or output is None else int(output.value),
        )


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


def _number_of(row: Mapping[str, str], name: str, where: str) -> int:
    try:
        return int(float(row[name]))
    except (ValueError, OverflowError):
        raise ConfigError(f"{where}: {name} must be a whole number, got {row[name]!r}") from None


def _time(text: str, where: str) -> float:
    """Return the seconds of a time such as 2023-11-16 18:15:46.6805900, whose digits beyond microseconds are cut."""
    whole, _, rest = text.strip().partition(".")
    digits = len(rest) - len(rest.lstrip("0123456789"))
    fraction, zone = rest[:digits], rest[digits:]
    try:
        moment = datetime.fromisoformat(whole + (f".{fraction[:6].ljust(6, '0')}" if fraction else "") + zone)
    except ValueError:
        raise ConfigError(f"{where}: TIMESTAMP must be like 2023-11-16 18:15:46.68, got {text!r}") from None
    return moment.timestamp() if moment.tzinfo else moment.replace(tzinfo=timezone.utc).timestamp()

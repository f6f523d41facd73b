"""Derived statistics of a trace: clients with their rates and the distributions of their sizes, without any request.

A JSON file of one object::

    {"format": "vllm-omni-sched statistics", "version": 1, "source": "...", "licence": "...", "clients": [...]}
"""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.work import Item
from vllm_omni_sched.sim.workloads.base import Arrival
from vllm_omni_sched.sim.workloads.distributions import Counts, client_times, contents, endless
from vllm_omni_sched.sim.workloads.importers import TraceFormat, import_trace
from vllm_omni_sched.sim.workloads.trace import Exact

FORMAT, VERSION = "vllm-omni-sched statistics", 1
FRACTIONS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Which quantiles of a size are kept."""
_PARTS = 120  # equal parts of a trace of requests, whose counts say how bursty it is
_LEAST_CV, _MOST_CV = 0.1, 20.0

Count = Annotated[int, msgspec.Meta(ge=0)]
Quantiles = Annotated[tuple[Count, ...], msgspec.Meta(min_length=len(FRACTIONS), max_length=len(FRACTIONS))]
Shares = dict[int, Annotated[float, msgspec.Meta(gt=0, le=1)]]


class ClientStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Statistics of one client.

    ``rate``: its mean requests per second. ``cv``: coefficient of variation of the gaps between them. ``text_tokens``,
    ``output_tokens`` and ``image_tokens`` (of one image) are the values at `FRACTIONS`. ``images``: share of the
    requests by their number of images.
    """

    rate: Annotated[float, msgspec.Meta(gt=0)]
    cv: Annotated[float, msgspec.Meta(ge=_LEAST_CV, le=_MOST_CV)]
    text_tokens: Quantiles
    output_tokens: Quantiles
    images: Shares = msgspec.field(default_factory=lambda: {0: 1.0})
    image_tokens: tuple[Count, ...] = ()


class Statistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file of statistics. ``licence``: that of the trace which they describe."""

    format: str
    version: int
    source: str
    licence: str
    clients: Annotated[tuple[ClientStatistics, ...], msgspec.Meta(min_length=1)]

    @property
    def rate(self) -> float:
        """Return the mean requests per second of all clients."""
        return math.fsum(client.rate for client in self.clients)


def read_statistics(path: Path) -> Statistics:
    """Return the statistics in a file.

    Raises:
        ConfigError: it cannot be read, or is not a file of statistics; the message names what is wrong in it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"statistics {str(path)!r} cannot be read: {error.strerror or error}") from None
    try:
        found = msgspec.json.decode(data, type=Statistics)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}: write the file with vllm-omni-sched import --statistics") from None
    if (found.format, found.version) != (FORMAT, VERSION):
        raise ConfigError(
            f"{path}: format {found.format!r} of version {found.version} is not supported; this release reads "
            f"{FORMAT!r} of version {VERSION}"
        )
    for number, client in enumerate(found.clients):
        if abs(math.fsum(client.images.values()) - 1) > 1e-3:
            raise ConfigError(f"{path}: clients[{number}].images: the shares must sum to 1")
        if any(client.images) and not client.image_tokens:
            raise ConfigError(f"{path}: clients[{number}].image_tokens is missing: its requests have images")
        for name in ("text_tokens", "output_tokens", "image_tokens"):
            values = getattr(client, name)
            if len(values) not in (0, len(FRACTIONS)):
                raise ConfigError(f"{path}: clients[{number}].{name}: must have {len(FRACTIONS)} quantiles")
            if list(values) != sorted(values):
                raise ConfigError(f"{path}: clients[{number}].{name}: quantiles must not fall, got {list(values)}")
    return found


def write_statistics(path: Path, statistics: Statistics) -> None:
    """Write a file of statistics, a client a line.

    Raises:
        OSError: the file cannot be written.
    """
    head = msgspec.to_builtins(statistics)
    clients = ",\n".join(f"  {msgspec.json.encode(client).decode()}" for client in statistics.clients)
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items() if key != "clients"]
    path.write_text("{\n" + "".join(lines) + ' "clients": [\n' + clients + "\n ]\n}\n")


def import_statistics(path: Path, format: TraceFormat, image_embeds: int = 0, licence: str = "") -> Statistics:
    """Return the statistics of a trace of this format.

    1. ServeGen publishes statistics of clients, a file of rates and one of sizes for each, in a folder. Of each client,
       rate and sizes are those over the whole span, weighted by its requests; clients without requests are left out.
    2. Any other trace of requests is described as one client. Its cv is that of the counts in 120 equal parts: the root
       of variance over mean, which for a renewal process is the cv of its gaps, also if the times are coarse.

    Args:
        path: the trace; for ServeGen the folder of one category, such as `data/multimodal/mm-image`.
        image_embeds: as for `import_trace`.
        licence: that of the trace; it is kept in the statistics.

    Raises:
        ConfigError: as for `import_trace`.
    """
    if format is TraceFormat.SERVEGEN:
        clients = _servegen(path)
        what = f"{path.name}, {len(clients)} clients"
    else:
        requests = import_trace(path, format, image_embeds).trace.requests
        clients = (_of_requests(requests),)
        what = f"{path.name}, {len(requests)} requests"
    return Statistics(FORMAT, VERSION, f"statistics derived from {format.value}: {what}", licence, clients)


def _of_requests(requests: Sequence[Exact]) -> ClientStatistics:
    times = np.array([request.at for request in requests])
    seconds = float(times[-1]) * (1 + 1 / len(times)) or 1.0
    counts = np.bincount(np.minimum((times / seconds * _PARTS).astype(int), _PARTS - 1), minlength=_PARTS)
    images = [len(request.items) for request in requests]
    numbers, occurrences = np.unique(images, return_counts=True)
    tokens = [embeds for request in requests for _, embeds in request.items]
    return ClientStatistics(
        rate=_short(len(times) / seconds),
        cv=_short(min(_MOST_CV, max(_LEAST_CV, math.sqrt(counts.var() / counts.mean())))),
        text_tokens=_quantiles([request.text_tokens for request in requests]),
        output_tokens=_quantiles([request.output_tokens for request in requests]),
        images=_shares(dict(zip(numbers.tolist(), occurrences.tolist(), strict=True))),
        image_tokens=_quantiles(tokens) if tokens else (),
    )


def _quantiles(values: Sequence[int], weights: Sequence[float] | None = None) -> tuple[int, ...]:
    """Return the least values that so large a part of the weights does not exceed."""
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(np.ones(len(order)) if weights is None else np.array(weights)[order])
    at = np.searchsorted(ends, np.array(FRACTIONS) * ends[-1] * (1 - 1e-12))
    return tuple(int(value) for value in np.array(values)[order][at])


def _shares(weights: Mapping[int, float]) -> dict[int, float]:
    total = math.fsum(weights.values())
    return {number: _short(weight / total) for number, weight in sorted(weights.items()) if weight / total >= 1e-6}


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _servegen(folder: Path) -> tuple[ClientStatistics, ...]:
    numbers = sorted(
        int(found[1]) for one in folder.glob("*") if (found := re.fullmatch(r"chunk-(\d+)-trace.csv", one.name))
    )
    if not numbers:
        raise ConfigError(f"{folder}: no chunk-N-trace.csv in it: name the folder of one of ServeGen's categories")
    rates = {number: servegen_rates(folder / f"chunk-{number}-trace.csv") for number in numbers}
    windows = max(len(of_client) for of_client in rates.values())
    clients = []
    for number in numbers:
        sizes = _servegen_sizes(folder / f"chunk-{number}-dataset.json", rates[number])
        requests = math.fsum(rate for _, rate, _ in rates[number])
        if sizes and requests:
            cv = math.fsum(rate * cv for _, rate, cv in rates[number]) / requests
            images = _shares(sizes.get("image_count", {0: 1.0}))
            clients.append(
                ClientStatistics(
                    rate=_short(requests / windows),
                    cv=_short(min(_MOST_CV, max(_LEAST_CV, cv))),
                    text_tokens=_quantiles(*_columns(sizes["text_tokens"])),
                    output_tokens=_quantiles(*_columns(sizes["output_tokens"])),
                    images=images,
                    image_tokens=_quantiles(*_columns(sizes["image_tokens"])) if any(images) else (),
                )
            )
    if not clients:
        raise ConfigError(f"{folder}: no client with requests in it")
    return tuple(sorted(clients, key=lambda client: -client.rate))


def servegen_rates(path: Path) -> list[tuple[float, float, float]]:
    """Return (time, requests per second, cv) of each window; a window without requests has the rate 0."""
    found = []
    for number, row in enumerate(csv.reader(io.StringIO(_text(path))), 1):
        try:
            at, rate, cv = (float(value) for value in row[:3])
            pattern = row[3]
        except (ValueError, IndexError):
            raise ConfigError(
                f"{path}, line {number}: must be a time, a rate, a cv and a pattern, got {','.join(row)!r}"
            ) from None
        has_requests = bool(pattern) and math.isfinite(rate) and math.isfinite(cv)
        found.append((at, rate, cv) if has_requests else (at, 0.0, 0.0))
    return found


def _servegen_sizes(path: Path, rates: Sequence[tuple[float, float, float]]) -> dict[str, dict[int, float]]:
    """Return the weight of each value by field, over all periods, weighted by their requests."""
    try:
        periods: Mapping[str, Mapping[str, str]] = msgspec.json.decode(_text(path), type=dict[str, dict[str, str]])
        begins = sorted((float(at), at) for at in periods)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}: is it a dataset of ServeGen?") from None
    found: dict[str, dict[int, float]] = {}
    for place, (begin, name) in enumerate(begins):
        end = begins[place + 1][0] if place + 1 < len(begins) else math.inf
        weight = math.fsum(rate for at, rate, _ in rates if begin <= at < end)
        fields = {field: _distribution(text, f"{path}, {name}, {field}") for field, text in periods[name].items()}
        if weight and all(fields.values()):
            for field, shares in fields.items():
                total = found.setdefault(_FIELDS.get(field, field), {})
                for value, share in shares.items():
                    total[value] = total.get(value, 0.0) + weight * share
    wanted = {"text_tokens", "output_tokens"} | ({"image_tokens"} if any(found.get("image_count", ())) else set())
    if found and (missing := sorted(wanted - found.keys())):
        raise ConfigError(f"{path}: {missing[0]} is missing: is it a dataset of ServeGen?")
    return found


_FIELDS = {"input_tokens": "text_tokens"}  # of its categories without images


def _distribution(text: str, where: str) -> dict[int, float]:
    """Return what ServeGen writes as the text of a Python dictionary: the probability of each value."""
    try:
        found = ast.literal_eval(text)
        return {int(value): float(share) for value, share in found.items()}
    except (ValueError, SyntaxError, AttributeError, TypeError):
        raise ConfigError(f"{where}: must be a table of values and probabilities, got {text[:60]!r}") from None


def _columns(weights: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(weights), list(weights.values())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file: unpack it first") from None


class StatisticsOptions(BaseModel):
    """Options of ``statistics``. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    file: str = Field(min_length=1, description="File of the statistics.")
    rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Mean requests per second; default: as in the statistics."
    )
    text_scale: float = Field(1.0, gt=0, le=1000, description="Factor on the text tokens.")
    output_scale: float = Field(1.0, gt=0, le=1000, description="Factor on the output tokens.")
    max_images: int = Field(1000, ge=0, description="Most images of a request; larger requests are cut to it.")
    sla: str = Field("interactive", min_length=1, description="The class of its requests.")


class DerivedLoad:
    """Generates requests from the statistics of a trace.

    1. Each client has its part of the rate, and Gamma gaps with its cv.
    2. Its tokens are drawn from its quantiles, with straight lines between them; its images from their shares. Sizes
       are independent of each other, and all contents differ.

    Source: the file of the statistics names it.
    """

    def __init__(self, statistics: Statistics, options: StatisticsOptions) -> None:
        self.rate = statistics.rate if options.rate is None else options.rate
        self.source = (
            f"{statistics.source} (licence: {statistics.licence or 'unknown'}); sizes are independent of each other"
        )
        self._statistics = statistics
        self._options = options

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals without end."""
        times, sizes, names = rng.spawn(3)
        clients = self._statistics.clients
        scale = self.rate / self._statistics.rate
        content = contents(names)
        draws = [self._sizes(client, own) for client, own in zip(clients, sizes.spawn(len(clients)), strict=True)]
        for at, number in client_times(times, [(client.rate * scale, client.cv) for client in clients]):
            text, output, images = next(draws[number])
            items = tuple([Item("image", embeds, next(content)) for embeds in images])
            yield Arrival(at, text, output, items, self._options.sla, number)

    def _sizes(self, client: ClientStatistics, rng: np.random.Generator) -> Iterator[tuple[int, int, list[int]]]:
        """Yield text tokens, output tokens and the embeddings of each image."""
        options = self._options
        texts, outputs, counts, tokens = rng.spawn(4)
        images = endless(lambda number: Counts(_whole(client.images)).draw(counts, number))
        embeds = endless(lambda number: _drawn(client.image_tokens, 1.0, tokens, number))
        for text, output in zip(
            endless(lambda number: _drawn(client.text_tokens, options.text_scale, texts, number)),
            endless(lambda number: _drawn(client.output_tokens, options.output_scale, outputs, number)),
            strict=True,
        ):
            shown = min(next(images), options.max_images)
            yield text, output, [next(embeds) for _ in range(shown)]


def _whole(shares: Mapping[int, float]) -> dict[int, float]:
    """Return shares that sum to 1 exactly: those of a file are rounded."""
    total = math.fsum(shares.values())
    return {number: share / total for number, share in shares.items()}


def _drawn(quantiles: Sequence[int], scale: float, rng: np.random.Generator, number: int) -> Any:
    values = np.interp(rng.random(number), FRACTIONS, quantiles) * scale
    return np.maximum(1, np.rint(values)).astype(np.int64)

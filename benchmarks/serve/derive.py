"""Derive statistics of a trace of others: ``python -m benchmarks.serve.derive TRACE OUT --format servegen``.

Statistics have clients with their rates and the distributions of their sizes, and no request of the trace.
"""

from __future__ import annotations

import argparse
import ast
import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.workloads.importers import TraceFormat, import_trace
from vllm_omni_sched.sim.workloads.replay import (
    FORMAT,
    FRACTIONS,
    LEAST_CV,
    MOST_CV,
    VERSION,
    ClientStatistics,
    Statistics,
)
from vllm_omni_sched.sim.workloads.trace import Exact

SERVEGEN = "servegen"
_PARTS = 120  # equal parts of a trace of requests, whose counts say how bursty it is


def write_statistics(path: Path, statistics: Statistics) -> None:
    """Write a file of statistics, a client a line.

    Raises:
        OSError: the file cannot be written.
    """
    head = msgspec.to_builtins(statistics)
    clients = ",\n".join(f"  {msgspec.json.encode(client).decode()}" for client in statistics.clients)
    lines = [f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items() if key != "clients"]
    path.write_text("{\n" + "".join(lines) + ' "clients": [\n' + clients + "\n ]\n}\n")


def derive(path: Path, format: str, image_embeds: int = 0, licence: str = "") -> Statistics:
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
    if format == SERVEGEN:
        clients = _servegen(path)
        what = f"{path.name}, {len(clients)} clients"
    else:
        requests = import_trace(path, TraceFormat(format), image_embeds).trace.requests
        clients = (_of_requests(requests),)
        what = f"{path.name}, {len(requests)} requests"
    return Statistics(FORMAT, VERSION, f"statistics derived from {format}: {what}", licence, clients)


def _of_requests(requests: Sequence[Exact]) -> ClientStatistics:
    times = np.array([request.at for request in requests])
    seconds = float(times[-1]) * (1 + 1 / len(times)) or 1.0
    counts = np.bincount(np.minimum((times / seconds * _PARTS).astype(int), _PARTS - 1), minlength=_PARTS)
    images = [len(request.items) for request in requests]
    numbers, occurrences = np.unique(images, return_counts=True)
    tokens = [embeds for request in requests for _, embeds in request.items]
    return ClientStatistics(
        rate=_short(len(times) / seconds),
        cv=_short(min(MOST_CV, max(LEAST_CV, math.sqrt(counts.var() / counts.mean())))),
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
                    cv=_short(min(MOST_CV, max(LEAST_CV, cv))),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="the trace; of ServeGen the folder of one category")
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", required=True, choices=[SERVEGEN, *(one.value for one in TraceFormat)])
    parser.add_argument("--image-embeds", type=int, default=0)
    parser.add_argument("--licence", default="", help="of the trace, which is kept in the statistics")
    options = parser.parse_args()
    write_statistics(options.out, derive(options.trace, options.format, options.image_embeds, options.licence))


if __name__ == "__main__":
    main()

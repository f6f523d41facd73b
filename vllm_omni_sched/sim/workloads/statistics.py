"""Derived statistics of a trace: clients with their rates and the distributions of their sizes, without any request.

A JSON file of one object::

    {"format": "vllm-omni-sched statistics", "version": 1, "source": "...", "licence": "...", "clients": [...]}
"""

from __future__ import annotations

import math
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

FORMAT, VERSION = "vllm-omni-sched statistics", 1
FRACTIONS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
"""Which quantiles of a size are kept."""
LEAST_CV, MOST_CV = 0.1, 20.0

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
    cv: Annotated[float, msgspec.Meta(ge=LEAST_CV, le=MOST_CV)]
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
        raise ConfigError(f"{path}: {error}: write the file with `python -m benchmarks.serve.derive`") from None
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

"""Replay a recorded trace, or requests drawn from the statistics of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.work import Item
from vllm_omni_sched.sim.workloads.base import Arrival, Counts, client_times, contents, endless
from vllm_omni_sched.sim.workloads.trace import Interval, Tokens, Trace

_POINTS = (np.arange(32) + 0.5) / 32


class TraceOptions(BaseModel):
    """Options of ``trace``. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    file: str = Field(min_length=1, description="File of the trace.")
    rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Mean requests per second; default: as recorded. Not with `scale`."
    )
    scale: float = Field(1.0, gt=0, le=1e6, description="Factor on the recorded rate.")
    repeat: int = Field(1, ge=0, description="Number of times that the trace is played; 0: without end.")
    item_modality: str = Field("image", min_length=1, description="Modality of items for which the trace has none.")
    item_embeds: int = Field(
        0, ge=0, description="Encoder embeddings of an item, for traces of intervals; 0: prompts are all text."
    )
    sla: str = Field("interactive", min_length=1, description="Class of requests for which the trace has none.")

    @model_validator(mode="after")
    def _one_rate(self) -> TraceOptions:
        if self.rate is not None and self.scale != 1:
            raise ValueError("options 'rate' and 'scale' both set the rate: keep one")
        return self


class Replay:
    """Plays a recorded trace, once or repeatedly.

    Of a trace of requests: exactly these requests; ``scale`` divides their times. Of a trace of intervals:

    1. An interval has its arrivals x ``scale``, rounded up or down at random so that the mean is right. Their times
       have Gamma gaps with its ``cv``; without one they are uniform over the interval.
    2. Prompt and output tokens are drawn independently from its histograms. Within a bucket log(tokens) is spread so
       that the mean is the recorded one, evenly if it is not known. A bucket without a bound ends at twice its
       begin.
    3. An interval in which no request finished takes the histograms of the last one before it that has some, or else of
       the first after it.
    4. Items are drawn as a Poisson number with the recorded mean per finished request, with ``item_embeds`` each, as
       far as the prompt has room for them. Classes are drawn in their recorded proportions.
    5. All contents of items differ: a trace does not record which were equal.
    """

    def __init__(self, trace: Trace, options: TraceOptions) -> None:
        recorded = trace.arrivals / trace.seconds
        self._scale = options.scale if options.rate is None else options.rate / recorded
        self.rate = recorded * self._scale
        self.source = (
            f"trace {options.file} ({trace.header.source or 'source unknown'}), "
            f"{'requests' if trace.requests else 'intervals'}, rate x {self._scale:g}"
        )
        self._trace = trace
        self._options = options

    def arrivals(self, rng: np.random.Generator) -> Iterator[Arrival]:
        """Yield arrivals until the trace has been played ``repeat`` times."""
        trace = self._trace
        seconds = trace.seconds / self._scale if trace.requests else trace.seconds
        play = self._exactly if trace.requests else self._drawn
        rounds: Iterable[int] = range(self._options.repeat) if self._options.repeat else count()
        names, draws = rng.spawn(2)
        content = contents(names)
        for number in rounds:
            yield from play(number * seconds, content, draws)

    def _exactly(self, begin: float, content: Iterator[int], _: np.random.Generator) -> Iterator[Arrival]:
        for request in self._trace.requests:
            items = tuple(Item(modality, embeds, next(content)) for modality, embeds in request.items)
            at = begin + request.at / self._scale
            text, output = request.text_tokens, request.output_tokens
            yield Arrival(at, text, output, items, request.sla, request.client)

    def _drawn(self, begin: float, content: Iterator[int], rng: np.random.Generator) -> Iterator[Arrival]:
        intervals = self._trace.intervals
        prompts = next((one for one in intervals if one.prompt_tokens.requests), None)
        outputs = next((one for one in intervals if one.generation_tokens.requests), None)
        for interval in intervals:
            prompts = interval if interval.prompt_tokens.requests else prompts
            outputs = interval if interval.generation_tokens.requests else outputs
            number = math.floor(interval.arrivals * self._scale + rng.random())
            if not number:
                continue
            prompt = token_draws(prompts.prompt_tokens)(rng, number) if prompts else np.ones(number, np.int64)
            output = token_draws(outputs.generation_tokens)(rng, number) if outputs else np.ones(number, np.int64)
            items = self._items(interval if interval.finished else prompts or interval, rng, prompt, content)
            classes = self._classes(interval, rng, number)
            times = begin + interval.at + interval.seconds * spread_times(rng, number, interval.cv)
            rows = zip(times.tolist(), prompt.tolist(), output.tolist(), items, classes, strict=True)
            for at, tokens, out, brought, sla in rows:
                text = tokens - sum(item.embeds for item in brought)
                yield Arrival(at, text, max(1, out), brought, sla)

    def _items(
        self, interval: Interval, rng: np.random.Generator, prompt: Any, content: Iterator[int]
    ) -> list[tuple[Item, ...]]:
        embeds = self._options.item_embeds
        known = interval.items if embeds and interval.finished else {}
        room = prompt // embeds if known else prompt
        found: list[list[Item]] = [[] for _ in range(len(prompt))]
        for modality, number in known.items():
            name = self._options.item_modality if modality == "unknown" else modality
            drawn = np.minimum(rng.poisson(number / interval.finished, len(prompt)), room)
            room = room - drawn
            for at, much in enumerate(drawn.tolist()):
                found[at] += [Item(name, embeds, next(content)) for _ in range(much)]
        return [tuple(items) for items in found]

    def _classes(self, interval: Interval, rng: np.random.Generator, number: int) -> list[str]:
        total = sum(interval.classes.values())
        if not total:
            return [self._options.sla] * number
        parts = [n / total for n in interval.classes.values()]
        return [str(name) for name in rng.choice(list(interval.classes), size=number, p=parts)]


def spread_times(rng: np.random.Generator, number: int, cv: float | None) -> Any:
    """Return so many times from 0 to 1, in order, with Gamma gaps; a coefficient of variation of 1 is uniform."""
    ends = np.cumsum(rng.standard_gamma(1 / (cv or 1.0) ** 2, number + 1))
    return ends[:-1] / ends[-1] if ends[-1] > 0 else np.sort(rng.random(number))


@lru_cache(maxsize=4096)
def token_draws(tokens: Tokens) -> Callable[[np.random.Generator, int], Any]:
    """Return a function that draws numbers of tokens from a histogram that is not empty (rule 2 of `Replay`)."""
    bounds = [bound for bound, _ in tokens.buckets]
    tops = [(2 * (bounds[at - 1] or 1.0) if at else 1.0) if bound is None else bound for at, bound in enumerate(bounds)]
    # a bucket holds values above the bound of the one before: whole tokens, so from one more
    lows = np.array([1.0] + [math.floor(top) + 1.0 for top in tops[:-1]])
    highs = np.maximum(lows, np.floor(tops))
    numbers = np.array([number for _, number in tokens.buckets], dtype=float)
    ends = np.cumsum(numbers) / numbers.sum()

    def values(power: float, buckets: Any, parts: Any) -> Any:
        return lows[buckets] * (highs[buckets] / lows[buckets]) ** (parts**power)

    power = 1.0
    if tokens.total:
        low, high = -6.0, 6.0  # of log(power): a higher one is nearer to the low ends
        every = np.arange(len(numbers))[:, None]
        for _ in range(40):
            middle = (low + high) / 2
            mean = float((values(math.exp(middle), every, _POINTS).mean(axis=1) * numbers).sum()) / numbers.sum()
            low, high = (middle, high) if mean > tokens.total / numbers.sum() else (low, middle)
        power = math.exp((low + high) / 2)

    def draw(rng: np.random.Generator, number: int) -> Any:
        buckets = np.minimum(np.searchsorted(ends, rng.random(number), side="right"), len(ends) - 1)
        return np.rint(values(power, buckets, rng.random(number))).astype(np.int64)

    return draw


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

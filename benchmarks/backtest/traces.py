"""Traces that no calibration has seen, from a seed: each a list of requests with their times, sizes and texts.

Three kinds that differ in how requests arrive and in what they ask:

- `mooncake-conversation`: one stream with a coefficient of variation of 1.57, long prompts.
- `servegen-images`: 35 clients of unlike rate and burstiness, most requests with an image.
- `servegen-day`: text whose rate goes as that of ServeGen's reasoning model over its day, in a few seconds: the
  busiest window has ten times the arrivals of the quietest.

Sizes are scaled to what a tiny model on two cores can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.backtest import EMBEDS, WARM_UP_SECONDS
from benchmarks.forecast.recorded import read_arrivals
from benchmarks.serve.workloads import STATISTICS, picture
from vllm_omni_sched.sim.work import Request
from vllm_omni_sched.sim.workloads.base import requests
from vllm_omni_sched.sim.workloads.registry import build
from vllm_omni_sched.sim.workloads.trace import FORMAT, VERSION, Exact, Header, write_trace

DAY = "reason/deepseek-r1"
MOST_PICTURES = 3
LETTERS = "abcdefghijklmnopqrstuvwxyz "
_WARM_UP = ((0.2, 60, 0, 20), (0.8, 200, 0, 40), (1.6, 100, 1, 20), (2.4, 60, 1, 20), (3.4, 20, 0, 40))


@dataclass(frozen=True)
class Planned:
    """A request that is sent ``at`` seconds from the start. ``text_tokens``: of its prompt, without its pictures'."""

    at: float
    text: str
    pictures: int
    output_tokens: int
    text_tokens: int = 0


Sizes = tuple[float, int, int, int]
"""Time, letters of the text, pictures, output tokens."""


def _derived(name: str, rate: float, text_scale: float, output_scale: float) -> Callable[[float, int], Iterable[Sizes]]:
    def drawn(seconds: float, seed: int) -> Iterator[Sizes]:
        options = {"rate": rate, "text_scale": text_scale, "output_scale": output_scale, "max_images": MOST_PICTURES}
        load = build({"kind": "statistics", "file": str(STATISTICS / f"{name}.json"), **options})
        return _sizes(takewhile(lambda one: one.arrival < seconds, requests(load, seed)))

    return drawn


def _day(rate: float, text_scale: float, output_scale: float) -> Callable[[float, int], Iterable[Sizes]]:
    def drawn(seconds: float, seed: int) -> Iterator[Sizes]:
        counts = read_arrivals()[DAY]
        rng = np.random.default_rng((seed, 7))
        passed = np.concatenate(([0.0], np.cumsum(counts))) / counts.sum()
        number = rng.poisson(rate * seconds)
        times = np.sort(np.interp(rng.random(number), passed, np.linspace(0.0, seconds, len(passed))))
        sizes = requests(build({"kind": "text", "rate": rate}), seed)
        for at, one in zip(times.tolist(), sizes, strict=False):
            text, output = (max(round(n * scale), 1) for n, scale in _scaled(one, text_scale, output_scale))
            yield at, text, 0, output

    return drawn


def _scaled(one: Request, text_scale: float, output_scale: float) -> Iterable[tuple[int, float]]:
    return (one.text_tokens, text_scale), (one.output_tokens, output_scale)


def _sizes(drawn: Iterable[Request]) -> Iterator[Sizes]:
    return ((one.arrival, one.text_tokens, len(one.items), one.output_tokens) for one in drawn)


TRACES: dict[str, Callable[[float, int], Iterable[Sizes]]] = {
    "mooncake-conversation": _derived("mooncake-conversation", 4.0, text_scale=0.02, output_scale=0.12),
    "servegen-images": _derived("servegen-images", 2.0, text_scale=0.05, output_scale=0.3),
    "servegen-day": _day(4.0, text_scale=0.2, output_scale=0.3),
}


def plan(name: str, seconds: float, seed: int, tokenizer: Any) -> list[Planned]:
    """Return the requests of a trace, behind those of the warm-up, which end before `WARM_UP_SECONDS`."""
    rng = np.random.default_rng((seed, 8))
    drawn = [*_WARM_UP, *((WARM_UP_SECONDS + at, *sizes) for at, *sizes in TRACES[name](seconds, seed))]
    found = []
    for at, letters, pictures, output in drawn:
        text = "".join(rng.choice(list(LETTERS), letters))
        tokens = _text_tokens(tokenizer, text, pictures)
        found.append(Planned(at, text, pictures, output, tokens))
    return found


def _text_tokens(tokenizer: Any, text: str, pictures: int) -> int:
    """Return the tokens of the prompt; a picture is one token of the template, which is not counted."""
    content = [{"type": "image"}] * pictures + [{"type": "text", "text": text}]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
    return len(tokenizer(prompt)["input_ids"]) - pictures


def content_of(text: str, urls: Sequence[str]) -> list[dict[str, Any]]:
    """Return the content of a chat message with these pictures."""
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]


def contents(planned: Sequence[Planned], seed: int) -> list[list[dict[str, Any]]]:
    """Return the content of the message of each request; all pictures differ."""
    rng = np.random.default_rng((seed, 9))
    return [content_of(one.text, [picture(rng) for _ in range(one.pictures)]) for one in planned]


def write(path: Path, name: str, planned: Sequence[Planned], seed: int) -> None:
    """Write the trace for the simulator."""
    header = Header(FORMAT, VERSION, source=f"benchmarks.backtest, {name}, seed {seed}")
    rows = [
        Exact(round(one.at, 6), one.text_tokens, one.output_tokens, (("image", EMBEDS),) * one.pictures)
        for one in planned
    ]
    write_trace(path, header, rows)

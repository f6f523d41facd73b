"""Workloads from a seed, as arguments of the clients: `vllm bench serve` and `aiperf profile`."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.mixed.workload import IMAGES
from vllm_omni_sched.sim.workloads.base import gamma_times, requests
from vllm_omni_sched.sim.workloads.registry import build
from vllm_omni_sched.sim.workloads.replay import read_statistics

SIDE = 336  # pixels of a picture, each way
MOST_PICTURES = 9  # of a request, as the servers accept
LETTERS = "abcdefghijklmnopqrstuvwxyz"
STATISTICS = Path(__file__).parent / "statistics"


@dataclass(frozen=True)
class Prompt:
    """A request of a file.

    Attributes:
        at: seconds from the start at which it arrives, at a rate of one request per second; None where the client draws
            the times.
        pictures: data URLs.
    """

    text: str
    pictures: tuple[str, ...]
    output_tokens: int
    at: float | None = None


@dataclass(frozen=True)
class Client:
    """Describes one process that sends requests.

    Attributes:
        rate: requests per second at load 1.
        burstiness: shape of the Gamma distribution of the times between arrivals; 1 is Poisson.
        prompts: returns the requests of a file; called with the number of requests and a seed. None: the client makes
            its own, all of one ``kind``.
        kind: "text" or "image".
        tokens, output_tokens: mean tokens of the text and of the answer of requests that the client makes.
        pictures: pictures of such a request: at least and at most.
    """

    rate: float
    burstiness: float
    prompts: Callable[[int, int], Sequence[Prompt]] | None = None
    kind: str = "text"
    tokens: int = 0
    output_tokens: int = 0
    pictures: tuple[int, int] = (0, 0)

    def kinds(self, number: int, seed: int) -> Sequence[str]:
        """Return "text" or "image" for each request."""
        if self.prompts is None:
            return [self.kind] * number
        return ["image" if prompt.pictures else "text" for prompt in self.prompts(number, seed)]


def bench_arguments(client: Client, folder: Path, number: int, seed: int) -> Sequence[str]:
    """Return the arguments of `vllm bench serve` that choose the dataset, whose file is written to the folder."""
    if client.prompts is None and client.kind == "text":
        return [
            *("--dataset-name", "random", "--random-input-len", str(client.tokens), "--random-range-ratio", "0.5"),
            *("--random-output-len", str(client.output_tokens)),
        ]
    if client.prompts is None:
        least, most = client.pictures
        middle = (least + most) // 2
        return [
            *("--dataset-name", "random-mm", "--random-input-len", str(client.tokens)),
            *("--random-output-len", str(client.output_tokens)),
            *("--random-mm-base-items-per-request", str(middle)),
            *("--random-mm-num-mm-items-range-ratio", str((most - middle) / middle)),
            *("--random-mm-limit-mm-per-prompt", json.dumps({"image": most, "video": 0})),
            *("--random-mm-bucket-config", str({(SIDE, SIDE, 1): 1.0})),
        ]
    lines = []
    for prompt in client.prompts(number, seed):
        content = [{"type": "image", "image": url} for url in prompt.pictures]
        content.append({"type": "text", "text": prompt.text})
        lines.append(json.dumps({"content": content, "output_tokens": prompt.output_tokens}) + "\n")
    file = folder / f"{seed}.jsonl"
    file.write_text("".join(lines))
    return [
        *("--dataset-name", "custom_image", "--dataset-path", str(file), "--custom-output-len", "-1"),
        "--disable-shuffle",
    ]


def schedule(clients: Sequence[Client], load: float, seconds: float, seed: int) -> list[tuple[float, Prompt]]:
    """Return the requests of all clients with their times in seconds, by time.

    Those of a client that makes its own requests are made here, and so are times that no trace gives: as those of
    `vllm bench serve`, they are stretched or shortened so that the last request arrives at the end of these seconds.
    """
    found = []
    for place, client in enumerate(clients):
        rate = client.rate * load
        number = max(1, round(rate * seconds))
        prompts = _made(client, number, seed) if client.prompts is None else client.prompts(number, seed)
        gamma = gamma_times(np.random.default_rng((seed, 4, place)), rate, client.burstiness**-0.5)
        drawn = [*islice(gamma, number)]
        times = [
            at * number / rate / drawn[-1] if prompt.at is None else prompt.at / rate
            for at, prompt in zip(drawn, prompts, strict=True)
        ]
        found += [*zip(times, prompts, strict=True)]
    return sorted(found, key=lambda one: one[0])


def _made(client: Client, number: int, seed: int) -> list[Prompt]:
    """Return requests like those that `vllm bench serve` makes for this client."""
    rng = np.random.default_rng((seed, 5))
    low = max(1, client.tokens // 2)
    return [
        Prompt(
            _words(rng, int(rng.integers(low, client.tokens + low + 1))),
            tuple(picture(rng) for _ in range(int(rng.integers(client.pictures[0], client.pictures[1] + 1)))),
            client.output_tokens,
        )
        for _ in range(number)
    ]


@lru_cache(maxsize=1)  # each server of a round gets the same
def _custom(number: int, seed: int) -> list[Prompt]:
    """Return requests of which most have no pictures, and the others as many as those of `benchmarks.mixed`."""
    rng, numbers = np.random.default_rng((seed, 2)), np.random.default_rng((seed, 1))
    counts = numbers.choice(IMAGES[0], size=number, p=IMAGES[1])
    shown = numbers.random(number) < 0.2
    found = []
    for count, with_pictures in zip(counts, shown, strict=True):
        pictures = tuple(picture(rng) for _ in range(int(count) if with_pictures else 0))
        found.append(Prompt(_words(rng, int(rng.integers(5, 40))), pictures, 120))
    return found


def _derived(name: str, rate: float, text_scale: float, output_scale: float) -> Client:
    """Return a client that sends what the statistics of a public trace describe, with less text and other pictures.

    The times that the statistics give are kept where a client can send at given times. Otherwise the burstiness is that
    of all clients of the trace together.
    """
    file = STATISTICS / f"{name}.json"
    clients = read_statistics(file).clients
    dispersion = math.fsum(one.rate * one.cv**2 for one in clients) / math.fsum(one.rate for one in clients)
    scales = {"text_scale": text_scale, "output_scale": output_scale}
    load = build({"kind": "statistics", "file": str(file), "rate": 1.0, "max_images": MOST_PICTURES, **scales})

    @lru_cache(maxsize=1)
    def prompts(number: int, seed: int) -> list[Prompt]:
        rng = np.random.default_rng((seed, 3))
        return [
            Prompt(
                _words(rng, request.text_tokens),
                tuple(picture(rng) for _ in request.items),
                request.output_tokens,
                request.arrival,
            )
            for request in islice(requests(load, seed), number)
        ]

    return Client(rate, 1 / dispersion, prompts)


def picture(rng: np.random.Generator) -> str:
    from PIL import Image

    picture = io.BytesIO()
    Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(picture, "PNG")
    return f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"


def _words(rng: np.random.Generator, number: int) -> str:
    return " ".join("".join(rng.choice(list(LETTERS), 4)) for _ in range(number))


RANDOM = Client(2.0, 1.0, tokens=64, output_tokens=200)
RANDOM_MM = Client(0.3, 0.25, kind="image", tokens=32, output_tokens=40, pictures=(1, 3))
CUSTOM = Client(2.0, 0.5, _custom)
SERVEGEN = _derived("servegen-images", 0.6, text_scale=0.1, output_scale=0.4)
MOONCAKE = _derived("mooncake-conversation", 1.5, text_scale=0.01, output_scale=0.4)

WORKLOADS: dict[str, tuple[Client, ...]] = {
    "random": (RANDOM,),
    "random-mm": (RANDOM_MM,),
    "random beside random-mm": (RANDOM, RANDOM_MM),
    "custom": (CUSTOM,),
    "servegen-images": (SERVEGEN,),
    "mooncake-conversation": (MOONCAKE,),
    "mooncake-conversation beside servegen-images": (MOONCAKE, SERVEGEN),
}
"""The clients that are started at the same moment, by workload."""

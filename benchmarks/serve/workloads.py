"""Workloads as arguments of `vllm bench serve`, from a seed."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.mixed.workload import IMAGES

SIDE = 336  # pixels of a picture, each way
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Client:
    """Describes one `vllm bench serve`.

    Attributes:
        rate: requests per second at load 1.
        burstiness: shape of the Gamma distribution of the times between arrivals; 1 is Poisson.
        arguments: returns those that choose the dataset; called with a folder for its files, the number of requests and
            a seed.
        kinds: returns "text" or "image" for each request; called with the number of requests and the seed.
    """

    rate: float
    burstiness: float
    arguments: Callable[[Path, int, int], Sequence[str]]
    kinds: Callable[[int, int], Sequence[str]]


def _random(folder: Path, number: int, seed: int) -> Sequence[str]:
    return [
        *("--dataset-name", "random", "--random-input-len", "64", "--random-range-ratio", "0.5"),
        *("--random-output-len", "200"),
    ]


def _random_mm(folder: Path, number: int, seed: int) -> Sequence[str]:
    return [
        *("--dataset-name", "random-mm", "--random-input-len", "32", "--random-output-len", "40"),
        *("--random-mm-base-items-per-request", "2", "--random-mm-num-mm-items-range-ratio", "0.5"),
        *("--random-mm-limit-mm-per-prompt", json.dumps({"image": 3, "video": 0})),
        *("--random-mm-bucket-config", str({(SIDE, SIDE, 1): 1.0})),
    ]


def _counts(number: int, seed: int) -> list[int]:
    """Return how many pictures each request of `_custom` has: most have none, the others as in `benchmarks.mixed`."""
    rng = np.random.default_rng((seed, 1))
    counts = rng.choice(IMAGES[0], size=number, p=IMAGES[1])
    return [int(count) if shown else 0 for count, shown in zip(counts, rng.random(number) < 0.2, strict=True)]


def _custom(folder: Path, number: int, seed: int) -> Sequence[str]:
    from PIL import Image

    rng = np.random.default_rng((seed, 2))
    lines = []
    for count in _counts(number, seed):
        content: list[dict[str, str]] = []
        for _ in range(count):
            picture = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)).save(picture, "PNG")
            url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
            content.append({"type": "image", "image": url})
        words = ["".join(rng.choice(list(LETTERS), 4)) for _ in range(int(rng.integers(5, 40)))]
        content.append({"type": "text", "text": " ".join(words)})
        lines.append(json.dumps({"content": content}) + "\n")
    file = folder / f"{seed}.jsonl"
    file.write_text("".join(lines))
    return [
        *("--dataset-name", "custom_image", "--dataset-path", str(file), "--custom-output-len", "120"),
        "--disable-shuffle",
    ]


def _all(kind: str) -> Callable[[int, int], Sequence[str]]:
    return lambda number, seed: [kind] * number


RANDOM = Client(2.0, 1.0, _random, _all("text"))
RANDOM_MM = Client(0.3, 0.25, _random_mm, _all("image"))
CUSTOM = Client(
    2.0, 0.5, _custom, lambda number, seed: ["image" if count else "text" for count in _counts(number, seed)]
)

WORKLOADS: dict[str, tuple[Client, ...]] = {
    "random": (RANDOM,),
    "random-mm": (RANDOM_MM,),
    "random beside random-mm": (RANDOM, RANDOM_MM),
    "custom": (CUSTOM,),
}
"""The clients that are started at the same moment, by workload."""

"""Requests whose items come back: conversations that send their items again with every turn, and a shared catalogue.

Pure, from a seed. The number of images per request is that of ServeGen's `mm-image` (as in `mixed`), gaps between
conversations are Gamma-distributed with a coefficient of variation above 1. Popularity in the catalogue is Zipf's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.mixed.workload import IMAGE_CV, IMAGES

SIZES = {"image": (256, 576, 1024, 2304, 4096), "audio": (50, 100, 250, 750)}  # embeddings
SECONDS_PER_EMBED = {"image": 2.0e-5, "audio": 6.0e-6}  # assumed, and a part that is quadratic: attention
SECONDS_PER_EMBED_SQUARED = {"image": 5.0e-9, "audio": 1.0e-9}
SECONDS_PER_ITEM = 2e-3
CATALOGUE, ZIPF = 2000, 0.9
THINK_SECONDS = 45.0


@dataclass(frozen=True)
class Mix:
    """Share of items that come from the catalogue, and mean number of turns of a conversation."""

    from_catalogue: float
    turns: float


MIXES = {"conversations": Mix(0.2, 4.0), "catalogue": Mix(0.9, 1.2)}


@dataclass(frozen=True)
class Item:
    mm_hash: str
    modality: str
    num_embeds: int

    @property
    def encode_seconds(self) -> float:
        """Return what encoding takes, by assumption."""
        per_embed = SECONDS_PER_EMBED[self.modality] + SECONDS_PER_EMBED_SQUARED[self.modality] * self.num_embeds
        return SECONDS_PER_ITEM + per_embed * self.num_embeds


@dataclass(frozen=True)
class Request:
    """Holds one turn of a conversation, which runs from ``at`` until ``until``, in seconds from the start."""

    at: float
    until: float
    items: tuple[Item, ...]


def requests(mix: Mix, conversations: int, rate: float, seed: int) -> list[Request]:
    """Draw conversations, ``rate`` new ones per second, and return their turns by time."""
    random = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, CATALOGUE + 1) ** ZIPF
    popularity /= popularity.sum()
    catalogue = [_item(random, f"catalogue-{i}") for i in range(CATALOGUE)]
    shape = 1.0 / IMAGE_CV**2
    found, at = [], 0.0
    for number in range(conversations):
        at += float(random.gamma(shape, 1.0 / (rate * shape)))
        items = tuple(
            catalogue[int(random.choice(CATALOGUE, p=popularity))]
            if random.random() < mix.from_catalogue
            else _item(random, f"own-{number}-{i}")
            for i in range(int(random.choice(IMAGES[0], p=np.array(IMAGES[1]))))
        )
        turn_at = at
        for _ in range(int(random.geometric(1.0 / mix.turns))):
            found.append(Request(turn_at, turn_at + float(random.uniform(1.0, 8.0)), items))
            turn_at += float(random.exponential(THINK_SECONDS)) + 8.0
    return sorted(found, key=lambda request: request.at)


def _item(random: np.random.Generator, mm_hash: str) -> Item:
    modality = "image" if random.random() < 0.7 else "audio"
    return Item(mm_hash, modality, int(random.choice(SIZES[modality])))

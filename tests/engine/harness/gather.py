"""Items in every arrangement, and which of their embeddings a step must gather, found the slow way."""

from __future__ import annotations

from random import Random
from typing import Any

import torch

from vllm_omni_sched.testing import make_item

NUM_TOKENS = 200


def items_of(arrangement: str, rng: Random, prefix: str = "") -> list[Any]:
    """Draw items over `NUM_TOKENS` tokens, some of them with placeholder tokens that take no embedding."""
    spans, position = [], rng.randrange(4)
    while position < NUM_TOKENS - 20:
        length = rng.randint(1, 20)
        spans.append((position, length))
        if "nested" in arrangement and length > 2:
            inside = rng.randrange(1, length)
            spans.append((position + inside, rng.randint(1, length - inside)))
        if arrangement == "same span":
            spans.append((position, length))
        position += length + rng.randrange(6)
    if arrangement.startswith("unsorted"):
        rng.shuffle(spans)
    return [_item(f"{prefix}{i}", offset, length, rng) for i, (offset, length) in enumerate(spans)]


def _item(name: str, offset: int, length: int, rng: Random) -> Any:
    some = [rng.random() < 0.7 for _ in range(length)]
    return make_item(offset, length, name, is_embed=some if rng.random() < 0.5 else None)


def outputs_of(items: list[Any]) -> dict[str, torch.Tensor]:
    """Return encoder outputs by hash: one row for each embedding, all rows different."""
    outputs = {}
    for i, item in enumerate(items):
        rows = item.mm_position.get_num_embeds()
        outputs[item.identifier] = torch.arange(rows, dtype=torch.float32).unsqueeze(1) + 1000 * (i + 1)
    return outputs


def gathered(items: list[Any], outputs: dict[str, torch.Tensor], start: int, end: int) -> tuple[list[Any], list[bool]]:
    """Return what a step over the tokens `[start, end)` must gather.

    That is the embeddings of each item that has one there, as lists, by where the items start; and for each token
    whether it takes one. Every item is looked at, token by token.
    """
    embeddings, mask = [], [False] * (end - start)
    for item in sorted(items, key=lambda item: item.mm_position.offset):
        position, rows = item.mm_position, []
        row = 0
        for k in range(position.length):
            takes = position.is_embed is None or bool(position.is_embed[k])
            if takes and start <= position.offset + k < end:
                rows.append(row)
                mask[position.offset + k - start] = True
            row += takes
        if rows:
            embeddings.append(outputs[item.identifier][rows].tolist())
    return embeddings, mask


def windows(rng: Random, count: int) -> list[tuple[int, int]]:
    """Steps `[start, end)`, from one token to all of them."""
    starts = [rng.randrange(NUM_TOKENS) for _ in range(count)]
    return [(start, rng.randint(start + 1, min(NUM_TOKENS, start + rng.choice((1, 8, 200))))) for start in starts]

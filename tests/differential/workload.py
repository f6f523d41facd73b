"""Random workloads: everything a seed decides, as plain values that can be applied to any number of schedulers.

Nothing here is shared between the schedulers under comparison: each `apply` builds its own requests, items and tensors.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from tests.differential.settings import Settings, random_options, random_settings
from vllm_omni_sched.testing import make_data, make_item, make_request

PLACEHOLDER = 3


@dataclass(frozen=True)
class Content:
    """One thing that can be embedded: an image with a hash. `data` is 'values', 'none' (the engine has it already) or
    'address' (a shared-memory descriptor, which vLLM never strips)."""

    mm_hash: str
    length: int
    is_embed: tuple[bool, ...] | None
    data: str

    @property
    def num_embeds(self) -> int:
        return self.length if self.is_embed is None else sum(self.is_embed)


@dataclass(frozen=True)
class Chunk:
    """A request, or the next part of a session: `items` are (offset, content), offsets from the chunk's start."""

    request_id: str
    tokens: tuple[int, ...]
    items: tuple[tuple[int, Content], ...]
    resumable: bool
    max_tokens: int
    priority: int
    arrival_time: float

    def build(self, block_size: int) -> Any:
        return make_request(
            self.request_id,
            len(self.tokens),
            [_item(offset, content) for offset, content in self.items],
            prompt_token_ids=self.tokens,
            resumable=self.resumable,
            max_tokens=self.max_tokens,
            priority=self.priority,
            arrival_time=self.arrival_time,
            block_size=block_size,
        )


def _item(offset: int, content: Content) -> Any:
    data = None if content.data == "none" else make_data(sum(content.mm_hash.encode()), num_values=content.length)
    if content.data == "address":
        data["address"] = data.pop("values")
    return make_item(offset, content.length, content.mm_hash, data=data, is_embed=content.is_embed)


class Workload:
    """What arrives, by seed. `prompt()` and its kin draw from one random stream, so call them in a fixed order."""

    def __init__(self, seed: int, **overrides: Any) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        many_items = overrides.pop("many_items", self.rng.random() < 0.25)
        self.contents = _catalog(self.rng, 4 if many_items else self.rng.choice((1, 4, 12, 40)))
        self.settings: Settings = random_settings(self.rng, self.contents, many_items=many_items, **overrides)
        self.options = random_options(self.rng)
        self._prompts: list[tuple[tuple[int, ...], tuple[tuple[int, Content], ...]]] = []
        self._num_requests = 0
        self._num_fresh = 0
        self._used: dict[str, set[str]] = {}

    def new_chunk(self, request_id: str | None, budget: int, *, resumable: bool, now: int) -> Chunk | None:
        """A new request, or (given its id) the next chunk of a session, of at most `budget` tokens with all it
        generates; None when nothing fits."""
        max_tokens = min(self.rng.choice((1, 1, 2, 5, 12, 40)), budget - 1)
        if max_tokens < 1:
            return None
        tokens, items = self._prompt(budget - max_tokens, is_update=request_id is not None)
        if request_id is None:
            request_id = f"r{self._num_requests}"
            self._num_requests += 1
        if not self.settings.repeated_items:
            items = tuple((offset, self._once(request_id, content)) for offset, content in items)
        return Chunk(request_id, tokens, items, resumable, max_tokens, self.rng.randrange(3), float(now))

    def _prompt(self, limit: int, *, is_update: bool) -> tuple[tuple[int, ...], tuple[tuple[int, Content], ...]]:
        if not is_update and self._prompts and self.rng.random() < 0.35:
            tokens, items = self.rng.choice(self._prompts)  # for prefix hits
            if len(tokens) <= limit and self.rng.random() < 0.5:
                return tokens, items
            tokens_list, items_list = _cut(list(tokens), list(items), self.rng.randrange(1, limit + 1))
        else:
            tokens_list, items_list = [], []
        shape = self.rng.choice(("text", "mixed", "mixed", "frames", "frames"))
        for _ in range(self.rng.randrange(1, (4 if is_update else 7) * (10 if self.settings.many_items else 1))):
            if shape != "text" and self.rng.random() < 0.75:
                content = self._content()
                if len(tokens_list) + content.length <= limit:
                    items_list += self._with_overlaps(len(tokens_list), content)
                    tokens_list += [PLACEHOLDER] * content.length
            if shape != "frames":
                length = min(self.rng.choice((1, 2, 5, 11, 30)), limit - len(tokens_list))
                tokens_list += [self.rng.choice((100, 101, 102)) for _ in range(length)]
        if not tokens_list:
            tokens_list = [100]
        prompt = tuple(tokens_list), tuple(items_list)
        self._prompts.append(prompt)
        return prompt

    def _content(self) -> Content:
        content = self.rng.choice(self.contents)
        return self._fresh(content) if self.rng.random() < self.settings.fresh_contents else content

    def _fresh(self, content: Content) -> Content:
        self._num_fresh += 1
        return replace(content, mm_hash=f"{content.mm_hash}-{self._num_fresh}")

    def _once(self, request_id: str, content: Content) -> Content:
        used = self._used.setdefault(request_id, set())
        if content.mm_hash in used:
            content = self._fresh(content)
        used.add(content.mm_hash)
        return content

    def _with_overlaps(self, offset: int, content: Content) -> list[tuple[int, Content]]:
        """The item, sometimes with a second one on the same tokens (audio in video), or inside it where that is
        allowed."""
        items = [(offset, content)]
        if self.rng.random() < self.settings.overlapping_items:
            others = [other for other in self.contents if other.length == content.length]
            if self.settings.nested_items:
                others = [other for other in self.contents if other.length <= content.length]
            other = self.rng.choice(others)
            items.append((offset + self.rng.randint(0, content.length - other.length), other))
        return items


def _cut(
    tokens: list[int], items: list[tuple[int, Content]], length: int
) -> tuple[list[int], list[tuple[int, Content]]]:
    """Return the prompt's first `length` tokens, or fewer where that would cut an item."""
    for offset, content in items:
        if offset < length < offset + content.length:
            length = offset
    return tokens[:length], [(offset, content) for offset, content in items if offset + content.length <= length]


def _catalog(rng: random.Random, largest: int) -> tuple[Content, ...]:
    contents = []
    for index in range(rng.choice((2, 6, 20))):
        length = rng.randint(1, largest)
        mask = None
        if rng.random() < 0.3:
            mask = tuple(rng.random() < 0.6 for _ in range(length))
        data = rng.choices(("values", "none", "address"), (18, 1, 1))[0]
        contents.append(Content(f"hash-{index}", length, mask, data))
    return tuple(contents)

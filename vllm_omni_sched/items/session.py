"""Both ends of a session's worker message: what the worker has, and what continues it.

A streaming session is one request that is updated again and again. vLLM sends all
of it to every worker at each update; we send what is new. The scheduler keeps a
`SessionTracker` of what it has sent, each worker a `SessionMirror` of what it got.
Every update names the state it continues, so that a lost or doubled one is an
error and never a wrong token.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_omni_sched.errors import SessionOutOfSyncError

BlockIds = Sequence[Sequence[int]]
"""Block ids by KV-cache group."""


class SessionUpdate(NamedTuple):
    """What is new in a session since the last message about it.

    Attributes:
        tokens_before, items_before, blocks_before: the state that this continues.
        tokens: prompt tokens from ``tokens_before`` on.
        items: features from ``items_before`` on.
        block_ids: KV blocks from ``blocks_before`` on, by group.
        covered: leading items whose data no worker needs any more.
        restored: earlier items, by id, whose data is needed again after a rewind.
    """

    tokens_before: int
    items_before: int
    blocks_before: tuple[int, ...]
    tokens: list[int]
    block_ids: tuple[list[int], ...]
    covered: int
    restored: dict[int, Any]


class SessionTracker:
    """Scheduler side: how much of one session its workers hold."""

    __slots__ = ("covered", "last_blocks", "num_blocks", "num_items", "num_tokens")

    def __init__(self, num_tokens: int, num_items: int, block_ids: BlockIds, covered: int) -> None:
        self.num_tokens = num_tokens
        self.num_items = num_items
        self.covered = covered
        self.replace_blocks(block_ids)

    def replace_blocks(self, block_ids: BlockIds) -> None:
        """All blocks were sent anew (resumed after preemption)."""
        self.num_blocks = [len(group) for group in block_ids]
        self.last_blocks = [group[-1] if group else -1 for group in block_ids]

    def append_blocks(self, block_ids: BlockIds) -> None:
        """Blocks of a running step were sent."""
        for g, group in enumerate(block_ids):
            if group:
                self.num_blocks[g] += len(group)
                self.last_blocks[g] = group[-1]

    def update(
        self,
        prompt_token_ids: Sequence[int],
        num_items: int,
        block_ids: BlockIds,
        covered: int,
        restored: dict[int, Any],
    ) -> SessionUpdate | None:
        """The message that brings workers up to date, or None when only a full one would.

        None is returned when the session is not a continuation of what was sent:
        fewer tokens, items or blocks, or another block where the last one was.
        """
        if len(prompt_token_ids) < self.num_tokens or num_items < self.num_items:
            return None
        before, num_blocks, last_blocks = tuple(self.num_blocks), self.num_blocks, self.last_blocks
        lengths = [len(group) for group in block_ids]
        for length, known, last, group in zip(lengths, before, last_blocks, block_ids, strict=True):
            if length < known or (known and group[known - 1] != last):
                return None
        new_blocks: list[list[int]] = []
        for g, (length, known) in enumerate(zip(lengths, before, strict=True)):
            new = list(block_ids[g][known:]) if length > known else []
            if new:
                num_blocks[g], last_blocks[g] = length, new[-1]
            new_blocks.append(new)
        tokens = list(prompt_token_ids[self.num_tokens :])
        update = SessionUpdate(self.num_tokens, self.num_items, before, tokens, tuple(new_blocks), covered, restored)
        self.num_tokens += len(tokens)
        self.num_items, self.covered = num_items, covered
        return update


class SessionMirror:
    """Worker side: one session as the scheduler last described it.

    ``tokens`` is an array of 64-bit ints, which numpy copies without boxing: a
    runner that re-adds the session to its batch pays a memcpy, not a conversion.
    """

    __slots__ = ("block_ids", "covered", "features", "tokens")

    def __init__(
        self, prompt_token_ids: Sequence[int], features: Sequence[Any], block_ids: BlockIds, covered: int
    ) -> None:
        self.tokens = array("q", prompt_token_ids)
        self.features = list(features)
        self.block_ids = [list(group) for group in block_ids]
        self.covered = covered

    def replace_blocks(self, block_ids: BlockIds) -> None:
        self.block_ids = [list(group) for group in block_ids]

    def append_blocks(self, block_ids: BlockIds) -> None:
        for group, new in zip(self.block_ids, block_ids, strict=True):
            group.extend(new)

    def apply(self, update: SessionUpdate, items: Sequence[Any], strip: Callable[[Any], Any]) -> None:
        """Bring this session up to date.

        Raises:
            SessionOutOfSyncError: the update does not continue this state.
        """
        have = (len(self.tokens), len(self.features), tuple(map(len, self.block_ids)))
        want = (update.tokens_before, update.items_before, update.blocks_before)
        if have != want:
            raise SessionOutOfSyncError(
                f"session update continues (tokens, items, blocks) {want}, but the worker holds {have}; "
                'set additional_config {"omni_sched": {"session_delta": "off"}} and report this'
            )
        self.tokens.extend(update.tokens)
        self.features.extend(items)
        self.append_blocks(update.block_ids)
        self.restore(update.restored)
        for i in range(self.covered, update.covered):
            self.features[i] = strip(self.features[i])
        self.covered = update.covered

    def restore(self, restored: Mapping[int, Any]) -> None:
        """Take back the data of items that must be encoded again."""
        for i, feature in restored.items():
            self.features[i] = feature
        if restored:
            self.covered = min(self.covered, *restored)

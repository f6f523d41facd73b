"""Both ends of a session's worker messages: the state that the worker holds, and the updates that continue it.

A streaming session is one request that is updated again and again. vLLM sends the whole request to every worker at each
update; we send only what is new. The scheduler keeps a `SessionTracker` of what it has sent, and each worker a
`SessionMirror` of what it received. Every update names the state that it continues, so that a lost or repeated update
is an error, and never a wrong token.
"""

from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_omni_sched.config.errors import SessionOutOfSyncError

BlockIds = Sequence[Sequence[int]]
"""Block ids by KV-cache group."""

NULL_BLOCK = 0
"""Id of the block that vLLM puts in place of a block that a sliding window has passed."""


class LiveBlocks(Sequence[int]):
    """The block ids of one group, read from the table in which the scheduler keeps them.

    As long as a request keeps its blocks, ``table`` is the same object. It grows at its end, and its leading blocks
    may become null blocks; nothing else in it changes.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def table(self) -> object:
        """Return an object whose identity is that of the table."""

    @abstractmethod
    def end_of_nulls(self, start: int, stop: int) -> int:
        """Return the first block from ``start`` on that is not a null block, or ``stop``."""


class SessionUpdate(NamedTuple):
    """Carries the new part of a session since the last message about it.

    Attributes:
        tokens_before, items_before, blocks_before: the state that this update continues.
        tokens: prompt tokens from ``tokens_before`` on.
        items: features from ``items_before`` on.
        block_ids: KV blocks from ``blocks_before`` on, by group.
        nulls: number of leading earlier blocks that are null blocks now, by group.
        covered: leading items whose data no worker needs any more.
        restored: earlier items, by id, whose data is needed again after a rewind.
    """

    tokens_before: int
    items_before: int
    blocks_before: tuple[int, ...]
    tokens: list[int]
    block_ids: tuple[list[int], ...]
    nulls: tuple[int, ...]
    covered: int
    restored: dict[int, Any]


class _SentBlocks:
    """One group's blocks as sent to workers, and how many of them were compared with the scheduler's table.

    ``table`` is the scheduler's table with which the first ``num_checked`` blocks were compared.
    """

    __slots__ = ("ids", "num_checked", "num_nulls", "table")

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.num_checked = 0
        self.num_nulls = 0
        self.table: object = None

    def continued_by(self, group: Sequence[int]) -> bool:
        """Return whether ``group`` begins with the sent blocks, except for those that have become null blocks."""
        known = len(self.ids)
        if len(group) < known:
            return False
        first = 0
        if isinstance(group, LiveBlocks):
            nulls = group.end_of_nulls(self.num_nulls, known)
            self.ids[self.num_nulls : nulls] = [NULL_BLOCK] * (nulls - self.num_nulls)
            self.num_nulls = nulls
            if group.table is self.table:
                first = max(nulls, self.num_checked)
            # The last block is compared in any case: it costs nothing.
            first = max(min(first, known - 1), 0)
        return list(group[first:known]) == self.ids[first:]

    def take(self, group: Sequence[int]) -> list[int]:
        """Return the blocks behind those that were sent, and count them as sent."""
        new = list(group[len(self.ids) :])
        self.ids += new
        self.num_checked = len(self.ids)
        self.table = group.table if isinstance(group, LiveBlocks) else None
        return new


class SessionTracker:
    """Tracks, on the scheduler's side, the state of one session that its workers hold.

    Drop it when the session loses its blocks.
    """

    __slots__ = ("_groups", "covered", "num_items", "num_tokens")

    def __init__(self, num_tokens: int, num_items: int, block_ids: BlockIds, covered: int) -> None:
        self.num_tokens = num_tokens
        self.num_items = num_items
        self.covered = covered
        self._groups = [_SentBlocks(group) for group in block_ids]

    def append_blocks(self, block_ids: BlockIds) -> None:
        """Record blocks that were sent for a running step."""
        for sent, new in zip(self._groups, block_ids, strict=True):
            sent.ids += new

    def update(
        self,
        prompt_token_ids: Sequence[int],
        num_items: int,
        block_ids: BlockIds,
        covered: int,
        restored: dict[int, Any],
    ) -> SessionUpdate | None:
        """Return the message that brings workers up to date; None if a full message is needed.

        A full message is needed if the session does not continue what was sent: it has fewer tokens, items or
        blocks, or another block in place of a sent one. Discard this tracker then.
        Blocks are compared one by one with those that were sent. In `LiveBlocks`, each block is compared only once:
        in the same table, it stays the same or becomes a null block.
        """
        if len(prompt_token_ids) < self.num_tokens or num_items < self.num_items:
            return None
        pairs = list(zip(self._groups, block_ids, strict=True))
        for sent, group in pairs:
            if not sent.continued_by(group):
                return None
        # Loops instead of generators, for speed: this runs once per session and step, mostly for a single group.
        before: list[int] = []
        new_blocks: list[list[int]] = []
        nulls: list[int] = []
        for sent, group in pairs:
            before.append(len(sent.ids))
            new_blocks.append(sent.take(group))
            nulls.append(sent.num_nulls)
        tokens = list(prompt_token_ids[self.num_tokens :])
        update = SessionUpdate(
            self.num_tokens, self.num_items, tuple(before), tokens, tuple(new_blocks), tuple(nulls), covered, restored
        )
        self.num_tokens += len(tokens)
        self.num_items, self.covered = num_items, covered
        return update


class SessionMirror:
    """Mirrors, on the worker's side, one session as last described by the scheduler.

    ``tokens`` is an array of 64-bit ints, which numpy copies without boxing: a runner that re-adds the session to its
    batch pays a memcpy, not a conversion.
    """

    __slots__ = ("block_ids", "covered", "features", "nulls", "tokens")

    def __init__(
        self, prompt_token_ids: Sequence[int], features: Sequence[Any], block_ids: BlockIds, covered: int
    ) -> None:
        self.tokens = array("q", prompt_token_ids)
        self.features = list(features)
        self.covered = covered
        self.replace_blocks(block_ids)

    def replace_blocks(self, block_ids: BlockIds) -> None:
        """Replace all blocks by new ones, because the request resumed after a preemption."""
        self.block_ids = [list(group) for group in block_ids]
        self.nulls = [0] * len(self.block_ids)  # leading blocks that are known to be null blocks

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
                f"a session update continues the state (tokens, items, blocks) {want}, but the worker holds {have}; "
                'set additional_config {"omni_sched": {"expert": {"session_delta": "off"}}} and report this'
            )
        self.tokens.extend(update.tokens)
        self.features.extend(items)
        for g, nulls in enumerate(update.nulls):
            self.block_ids[g][self.nulls[g] : nulls] = [NULL_BLOCK] * (nulls - self.nulls[g])
            self.nulls[g] = nulls
        self.append_blocks(update.block_ids)
        self.restore(update.restored)
        for i in range(self.covered, update.covered):
            self.features[i] = strip(self.features[i])
        self.covered = update.covered

    def restore(self, restored: Mapping[int, Any]) -> None:
        """Store the data of items that must be encoded again."""
        for i, feature in restored.items():
            self.features[i] = feature
        if restored:
            self.covered = min(self.covered, *restored)

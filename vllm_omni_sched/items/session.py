"""Both ends of a session's worker message: what the worker has, and what continues it.

A streaming session is one request that is updated again and again. vLLM sends all
of it to every worker at each update; we send what is new. The scheduler keeps a
`SessionTracker` of what it has sent, each worker a `SessionMirror` of what it got.
Every update names the state it continues, so that a lost or doubled one is an
error and never a wrong token.
"""

from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_omni_sched.errors import SessionOutOfSyncError

BlockIds = Sequence[Sequence[int]]
"""Block ids by KV-cache group."""

NULL_BLOCK = 0
"""Id of the block that vLLM puts where a sliding window has left a block behind."""


class LiveBlocks(Sequence[int]):
    """Block ids of one group, read from the table in which the scheduler keeps them.

    As long as a request keeps its blocks, ``table`` is one object. It grows at its end, and its
    leading blocks may become null blocks; nothing else in it changes.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def table(self) -> object:
        """Whose identity is that of the table."""

    @abstractmethod
    def end_of_nulls(self, start: int, stop: int) -> int:
        """The first block from ``start`` on that is not a null block, or ``stop``."""


class SessionUpdate(NamedTuple):
    """What is new in a session since the last message about it.

    Attributes:
        tokens_before, items_before, blocks_before: the state that this continues.
        tokens: prompt tokens from ``tokens_before`` on.
        items: features from ``items_before`` on.
        block_ids: KV blocks from ``blocks_before`` on, by group.
        nulls: leading blocks of those before that are null blocks now, by group.
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
    """One group's blocks as workers were told of them, and how far they are known to be those of the scheduler.

    ``table`` is the scheduler's table with which the first ``num_checked`` of them were compared.
    """

    __slots__ = ("ids", "num_checked", "num_nulls", "table")

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.num_checked = 0
        self.num_nulls = 0
        self.table: object = None

    def continued_by(self, group: Sequence[int]) -> bool:
        """Whether ``group`` begins with what was sent, but for blocks that have become null blocks."""
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
            # The last one is looked at in any case: it costs nothing.
            first = max(min(first, known - 1), 0)
        return list(group[first:known]) == self.ids[first:]

    def take(self, group: Sequence[int]) -> list[int]:
        """The blocks behind those that were sent; they count as sent from now on."""
        new = list(group[len(self.ids) :])
        self.ids += new
        self.num_checked = len(self.ids)
        self.table = group.table if isinstance(group, LiveBlocks) else None
        return new


class SessionTracker:
    """Scheduler side: what its workers hold of one session.

    It is to be dropped when the session loses its blocks.
    """

    __slots__ = ("_groups", "covered", "num_items", "num_tokens")

    def __init__(self, num_tokens: int, num_items: int, block_ids: BlockIds, covered: int) -> None:
        self.num_tokens = num_tokens
        self.num_items = num_items
        self.covered = covered
        self._groups = [_SentBlocks(group) for group in block_ids]

    def append_blocks(self, block_ids: BlockIds) -> None:
        """Blocks of a running step were sent."""
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
        """The message that brings workers up to date, or None when only a full one would.

        None is returned when the session is not a continuation of what was sent: fewer tokens, items or blocks, or
        another block where one was. This tracker is of no use then.

        Blocks are compared one by one with those that were sent. Of `LiveBlocks` this is done once for each: in the
        table that it was compared with, a block stays what it is or becomes a null block.
        """
        if len(prompt_token_ids) < self.num_tokens or num_items < self.num_items:
            return None
        pairs = list(zip(self._groups, block_ids, strict=True))
        for sent, group in pairs:
            if not sent.continued_by(group):
                return None
        # Loops, and not generators: with many sessions this is called as often in each step, mostly for one group.
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
    """Worker side: one session as the scheduler last described it.

    ``tokens`` is an array of 64-bit ints, which numpy copies without boxing: a
    runner that re-adds the session to its batch pays a memcpy, not a conversion.
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
        """All blocks were sent anew (resumed after preemption)."""
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
                f"session update continues (tokens, items, blocks) {want}, but the worker holds {have}; "
                'set additional_config {"omni_sched": {"session_delta": "off"}} and report this'
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
        """Take back the data of items that must be encoded again."""
        for i, feature in restored.items():
            self.features[i] = feature
        if restored:
            self.covered = min(self.covered, *restored)

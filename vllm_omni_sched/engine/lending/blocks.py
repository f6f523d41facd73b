"""Scheduler half of lending: takes free KV blocks out of vLLM's block pool, and puts them back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


class Pool(Protocol):
    """The part of vLLM's ``BlockPool`` that lending uses."""

    def get_new_blocks(self, num_blocks: int) -> Sequence[Any]: ...
    def free_blocks(self, ordered_blocks: Any) -> None: ...
    def get_num_free_blocks(self) -> int: ...


class LentBlocks:
    """Holds the lent blocks, as if they belonged to a request.

    1. Only free blocks are taken, by the pool's own call: those without contents first, then cached ones, the one that
       was unused for the longest time first.
    2. Blocks that return are the first that the pool gives to requests, and no prefix is found in them.
    3. Workers are told of each block once per loan, and not of a block that has returned before.
    4. While the prefix cache is reset, the pool has all blocks, as it resets nothing while any is in use.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._blocks: list[Any] = []
        self._new: dict[int, None] = {}  # blocks that workers have not been told of
        self.taken = 0  # in all

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def block_ids(self) -> list[int]:
        """Return the ids of the lent blocks."""
        return [block.block_id for block in self._blocks]

    def resize(self, count: int) -> None:
        """Lend so many blocks from now on.

        Raises:
            ValueError: fewer are free; nothing has changed.
        """
        more = count - len(self._blocks)
        if more > 0:
            blocks = self._pool.get_new_blocks(more)
            self._blocks += blocks
            self.taken += more
            self._new.update(dict.fromkeys(block.block_id for block in blocks))
        elif more < 0:
            gone, self._blocks = self._blocks[count:], self._blocks[:count]
            for block in gone:
                self._new.pop(block.block_id, None)
            self._pool.free_blocks(gone)

    @contextmanager
    def returned(self) -> Iterator[None]:
        """Return all blocks to the pool for the duration of the block, which takes none, and lend as many again."""
        count = len(self)
        self.resize(0)
        try:
            yield
        finally:
            self.resize(count)

    @property
    def has_news(self) -> bool:
        """Return whether workers must be told of lent blocks."""
        return bool(self._new)

    def take_new(self) -> tuple[int, ...]:
        """Return the ids of blocks that were lent since the last call and are still."""
        new, self._new = tuple(self._new), {}
        return new

"""Views of a session's block ids that look ids up on demand: a delta needs the last few of thousands."""

from collections.abc import Container, Sequence
from typing import Any, overload

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager

from vllm_omni_sched.items.session import LiveBlocks

_LIVE = (FullAttentionManager, SlidingWindowManager)
"""Managers whose block table of a request behaves as `LiveBlocks` requires. For all others, subclasses included, every
block is compared."""


class BlockIdView(LiveBlocks):
    """Block ids of one KV cache group, without building a list of them; valid until the next step."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    @property
    def table(self) -> object:
        return self._blocks

    def end_of_nulls(self, start: int, stop: int) -> int:
        blocks = self._blocks
        while start < stop and blocks[start].is_null:
            start += 1
        return start

    def __len__(self) -> int:
        return len(self._blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        found: Any = self._blocks[index]
        return [block.block_id for block in found] if isinstance(index, slice) else found.block_id


class SessionBlocks(KVCacheBlocks):
    """`KVCacheBlocks` of a session that workers hold already; ``live`` tells which groups need no list of ids."""

    def __init__(self, blocks: tuple[Sequence[Any], ...], live: Sequence[bool]) -> None:
        super().__init__(blocks)
        self._live = live

    def get_block_ids(self, allow_none: bool = False, **kwargs: Any) -> Any:
        if allow_none or kwargs:
            return super().get_block_ids(allow_none, **kwargs)
        views = [BlockIdView(group) for group in self.blocks]
        return tuple(view if live else view[:] for view, live in zip(views, self._live, strict=True))


def look_up_lazily(kv_cache_manager: Any, tracked: Container[str]) -> None:
    """Make this manager answer `get_blocks` of tracked sessions with `SessionBlocks`; idempotent."""
    if "get_blocks" in vars(kv_cache_manager):
        return
    get_blocks = kv_cache_manager.get_blocks
    live = [type(manager) in _LIVE for manager in kv_cache_manager.coordinator.single_type_managers]

    def get_session_blocks(request_id: str) -> KVCacheBlocks:
        found: KVCacheBlocks = get_blocks(request_id)
        return SessionBlocks(found.blocks, live) if request_id in tracked else found

    kv_cache_manager.get_blocks = get_session_blocks

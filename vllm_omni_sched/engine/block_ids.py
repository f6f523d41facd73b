"""Block ids of a session, looked up when asked for: a delta wants the last few of thousands."""

from collections.abc import Container, Sequence
from typing import Any, overload

from vllm.v1.core.kv_cache_manager import KVCacheBlocks


class BlockIdView(Sequence[int]):
    """Ids of one group's blocks, without a list of them; valid until the next step."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

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
    """`KVCacheBlocks` of a session that its workers know."""

    def get_block_ids(self, allow_none: bool = False, **kwargs: Any) -> Any:
        if allow_none or kwargs:
            return super().get_block_ids(allow_none, **kwargs)
        return tuple(BlockIdView(group) for group in self.blocks)


def look_up_lazily(kv_cache_manager: Any, tracked: Container[str]) -> None:
    """Let this manager answer `get_blocks` of tracked sessions with `SessionBlocks`; done once, when one arrives."""
    if "get_blocks" in vars(kv_cache_manager):
        return
    get_blocks = kv_cache_manager.get_blocks

    def get_session_blocks(request_id: str) -> KVCacheBlocks:
        found: KVCacheBlocks = get_blocks(request_id)
        return SessionBlocks(found.blocks) if request_id in tracked else found

    kv_cache_manager.get_blocks = get_session_blocks

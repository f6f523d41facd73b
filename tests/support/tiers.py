"""Paths through files and over tiers, as small as tests want them."""

from __future__ import annotations

from typing import Any

from tests.support.arena import MIB, small
from vllm_omni_sched.connectors.arena import ArenaPath
from vllm_omni_sched.connectors.base import Path
from vllm_omni_sched.connectors.disk import DiskOptions, DiskPath
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.tiers import Tier, TieredPath, TiersOptions
from vllm_omni_sched.errors import NoRoomError


def files(root: str, **options: Any) -> DiskOptions:
    """Of a path through files under ``root``."""
    return DiskOptions.model_validate({"directory": root, "arena": "files", "max_bytes": 96 * MIB, **options})


def disk(root: str) -> Path:
    return DiskPath(files(root))


def tiers(root: str) -> Path:
    """An arena with room for 32 MB of pixels above files."""
    pool = {"block_bytes": 4096, "initial_bytes": MIB, "max_bytes": 32 * MIB, "inline_bytes": 4096}
    capacity = {"text": MIB, "image": 32 * MIB, "audio": MIB}
    upper, lower = ArenaPath(small(root, image=pool)), DiskPath(files(root))
    return TieredPath([Tier(upper, capacity), Tier(lower, {"": 96 * MIB})], TiersOptions())


class Refusing(DiskPath):
    """Files that take no messages while `refuses`."""

    refuses = False

    def put(self, message: Message, deadline: float | None = None) -> int:
        if self.refuses:
            raise NoRoomError(f"no room for {message.nbytes} bytes: it was told so")
        return super().put(message, deadline)

"""Paths through files and over tiers, as small as tests want them."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

from tests.support.arena import KIB, MIB, small
from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.connectors.arena import ArenaTransport
from vllm_omni_sched.connectors.disk import DiskOptions, DiskTransport
from vllm_omni_sched.connectors.tiers import TieredTransport
from vllm_omni_sched.connectors.transport import Transport

PAYLOAD = 6 * KIB


def files(root: str, **options: Any) -> DiskOptions:
    """Return options of a transport through files under ``root``."""
    return DiskOptions.model_validate({"directory": root, "arena": "files", "max_bytes": 96 * MIB, **options})


def messages(directory: FilePath) -> list[str]:
    """Return the messages in a directory of files: ``.msg`` waits, ``.got`` is being got."""
    return sorted(path.suffix for path in directory.iterdir() if path.suffix != ".life")


def disk(root: str) -> Transport:
    return DiskTransport(files(root))


def tiers(root: str) -> Transport:
    """Make a transport with an arena for 32 MB of pixels above files."""
    pool = {"block_bytes": 4096, "initial_bytes": MIB, "max_bytes": 32 * MIB, "inline_bytes": 4096}
    return TieredTransport([ArenaTransport(small(root, image=pool)), DiskTransport(files(root))])


def small_tiers(root: str, clock: Clock = monotonic_seconds, **options: Any) -> TieredTransport:
    """Return an arena that holds 100 messages of 4 KB in the pool of pixels, above files.

    Args:
        options: of the arena and of `DiskOptions`; ``max_inflight``: of both together.
    """
    limits = {name: options.pop(name) for name in list(options) if name in ("max_bytes", "ttl_seconds")}
    pool = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": 100 * 8 * KIB, "inline_bytes": 0}
    of_arena = small(root, image=pool, **options, **{name: limits[name] for name in limits if name == "ttl_seconds"})
    upper, lower = ArenaTransport(of_arena, clock=clock), DiskTransport(files(root, **limits), clock=clock)
    return TieredTransport([upper, lower], of_arena, clock=clock)

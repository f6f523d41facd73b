"""Paths through files and over tiers, as small as tests want them."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

from tests.support.arena import KIB, MIB, small
from vllm_omni_sched.clock import Clock, monotonic_seconds
from vllm_omni_sched.config.errors import NoRoomError
from vllm_omni_sched.connectors.arena import ArenaTransport
from vllm_omni_sched.connectors.disk import DiskOptions, DiskTransport
from vllm_omni_sched.connectors.framing import Message
from vllm_omni_sched.connectors.tiers import Tier, TieredTransport, TiersOptions
from vllm_omni_sched.connectors.transport import Transport

PAYLOAD = 6 * KIB
MANY = 20  # messages with such a payload: the arena of `small_tiers` is above the high mark of `DOWN`, and has room
DOWN = {"high_water": 0.1, "low_water": 0.05}


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
    capacity = {"text": MIB, "image": 32 * MIB, "audio": MIB}
    upper, lower = ArenaTransport(small(root, image=pool)), DiskTransport(files(root))
    return TieredTransport([Tier(upper, capacity), Tier(lower, {"": 96 * MIB})], TiersOptions())


def small_tiers(root: str, clock: Clock = monotonic_seconds, **options: Any) -> TieredTransport:
    """Return an arena that holds 100 messages of 4 KB in the pool of pixels, above 64 MB of files.

    Args:
        options: of `DiskOptions` and `TierRules`; ``moves_itself``: in the background; ``checksum``: of the arena.
    """
    upper_options = {"checksum": options.pop("checksum")} if "checksum" in options else {}
    limits = {name: options.pop(name) for name in list(options) if name in DiskOptions.model_fields}
    lower = DiskTransport(files(root, **limits), clock=clock)
    moves_itself = options.pop("moves_itself", False)
    inflight = options.pop("max_inflight", None)
    pool = {"block_bytes": 4 * KIB, "initial_bytes": 64 * KIB, "max_bytes": 100 * 8 * KIB, "inline_bytes": 0}
    upper = ArenaTransport(small(root, image=pool, **upper_options), clock=clock)
    capacity = {"text": MIB, "image": 100 * 8 * KIB, "audio": MIB}
    rules = TiersOptions(min_bytes=0, interval_seconds=0.002, **options)
    tiers = [Tier(upper, capacity), Tier(lower, {"": 64 * MIB})]
    return TieredTransport(tiers, rules, inflight, clock=clock, background=moves_itself)


def expect(path: TieredTransport, seconds: float) -> None:
    """Let messages be expected to wait so long from now on, as after many that have."""
    path._waits.expected = lambda edge: seconds  # type: ignore[method-assign]


class Refusing(DiskTransport):
    """Files that take no messages while `refuses`."""

    refuses = False

    def put(self, message: Message, deadline: float | None = None) -> int:
        if self.refuses:
            raise NoRoomError(f"no room for {message.nbytes} bytes: it was told so")
        return super().put(message, deadline)

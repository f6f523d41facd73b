"""A sender's records of its messages and their receivers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vllm_omni_sched.connectors.arena import meeting
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.medium import EdgeCounts

ALIVE_FOR = 0.5
"""Seconds for which a receiver that was found alive is not checked again."""


class Sent(NamedTuple):
    """A message in flight."""

    slot: int
    edge: Edge
    key: str
    name: bytes
    pool: int
    offset: int
    nbytes: int
    put_at: float
    done: Callable[[], None] | None


@dataclass
class OutboxCounts(EdgeCounts):
    """Outcomes of messages; ``discarded`` includes messages that were received, and given back by dead receivers."""

    inline: int = 0
    given_back: int = 0  # by receivers that died
    damaged: int = 0  # records in the index that were damaged


class Receivers:
    """Checks which receivers are alive, with a short-lived cache.

    Args:
        directory: directory of the arena.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen_alive: dict[int, float] = {}

    def is_alive(self, holder: int, now: float) -> bool:
        seen = self._seen_alive.get(holder)
        if seen is not None and 0 <= now - seen < ALIVE_FOR:
            return True
        alive = meeting.is_alive(self._directory / f"{holder:016x}{meeting.INBOX}")
        if alive:
            self._seen_alive[holder] = now
        return alive

    def forget(self) -> None:
        """Drop the cache, so that all receivers are checked again."""
        self._seen_alive.clear()

"""Counts of lost messages, which `health` reports for a while after each loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_omni_sched.clock import Clock

RECENT_SECONDS = 60.0
"""Seconds for which `health` reports a loss."""


class RecentLosses:
    """Monotonic counts, and the time when one of them was last observed to grow.

    Args:
        names: names of the counts.
    """

    def __init__(self, names: Sequence[str], clock: Clock) -> None:
        self._names, self._clock = names, clock
        self._seen: dict[str, int] = {}
        self._at = 0.0

    def recent(self, facts: Mapping[str, Any]) -> list[str]:
        """Return all counts above 0, if one of them has grown within `RECENT_SECONDS`."""
        losses, now = {name: facts[name] for name in self._names if facts.get(name)}, self._clock()
        if losses != self._seen:
            self._seen, self._at = losses, now
        return [f"{count} {name}" for name, count in losses.items()] if now - self._at <= RECENT_SECONDS else []

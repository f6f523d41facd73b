"""What was lost lately: `health` speaks of it for a while, and then no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_omni_sched.clock import Clock

LATELY = 60.0
"""Seconds that `health` speaks of what happened."""


class Losses:
    """Counts that only grow, and when one last did, as far as somebody asked.

    Args:
        names: of the counts.
    """

    def __init__(self, names: Sequence[str], clock: Clock) -> None:
        self._names, self._clock = names, clock
        self._seen: dict[str, int] = {}
        self._at = 0.0

    def lately(self, facts: Mapping[str, Any]) -> list[str]:
        """All that is not 0, if some of it is new or was within `LATELY`."""
        losses, now = {name: facts[name] for name in self._names if facts.get(name)}, self._clock()
        if losses != self._seen:
            self._seen, self._at = losses, now
        return [f"{count} {name}" for name, count in losses.items()] if now - self._at <= LATELY else []

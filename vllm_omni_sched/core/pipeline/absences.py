"""Decide what becomes of replicas on other hosts that are silent."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

KEEP_SECONDS = 600.0
"""After so long, vLLM-Omni's coordinator forgets a silent replica, too."""


class AbsenceStep(str, Enum):
    """What follows for a replica that was silent."""

    USE = "use"  # it is heard again, and serves again
    GIVE_UP = "give_up"  # it is not used again, and its client is closed


class AbsenceAction(NamedTuple):
    """A step to take with a replica."""

    step: AbsenceStep
    stage_id: int
    replica_id: int


@dataclass(frozen=True)
class _Absence:
    address: str
    since: float


class Absences:
    """Knows the replicas on other hosts that are silent, and decides when they are used again.

    1. A replica that is no longer reported counts as dead, but its process may live: it may be stopped, or its link
       may be cut. So it is remembered.
    2. If it is reported again, it is used again (`USE`).
    3. It is given up if another process has taken its number, or after `KEEP_SECONDS` (`GIVE_UP`).
    """

    def __init__(self) -> None:
        self._absent: dict[tuple[int, int], _Absence] = {}

    def __len__(self) -> int:
        """Return the number of replicas that are remembered."""
        return len(self._absent)

    def silent(self, stage_id: int, replica_id: int, address: str, now: float) -> None:
        """Record that a replica, known by its address, is no longer reported."""
        self._absent[stage_id, replica_id] = _Absence(address, now)

    def check(
        self, now: float, reported: Callable[[int], Collection[str]], taken: Callable[[int, int], bool]
    ) -> list[AbsenceAction]:
        """Return what to do now.

        Args:
            reported: returns the addresses of the replicas of a stage that are reported.
            taken: returns whether a replica that serves has this number.
        """
        actions = []
        for (stage_id, replica_id), one in list(self._absent.items()):
            if taken(stage_id, replica_id):
                step = AbsenceStep.GIVE_UP
            elif one.address in reported(stage_id):
                step = AbsenceStep.USE
            elif now - one.since >= KEEP_SECONDS:
                step = AbsenceStep.GIVE_UP
            else:
                continue
            del self._absent[stage_id, replica_id]
            actions.append(AbsenceAction(step, stage_id, replica_id))
        return actions

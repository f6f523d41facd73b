"""Order in which transports are tried for a message, by distance and health. Pure: a snapshot in, a plan out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

FIRST_RETRY, LONGEST_RETRY = 0.5, 30.0  # seconds


class RetrySchedule:
    """Schedule of retries of a transport that refused messages: after a wait that doubles with every refusal."""

    def __init__(self) -> None:
        self._wait = 0.0
        self._until = 0.0

    @property
    def well(self) -> bool:
        return not self._wait

    def is_due(self, now: float) -> bool:
        """Return whether a sick transport should be tried now."""
        return not self.well and now >= self._until

    def refused(self, now: float) -> None:
        """Record a refused message."""
        self._wait = min(LONGEST_RETRY, 2 * self._wait or FIRST_RETRY)
        self._until = now + self._wait

    def took(self) -> None:
        """Record an accepted message."""
        self._wait = 0.0


class RouteReason(str, Enum):
    """Reason for the position of a transport among those to try."""

    ONLY = "only"  # no other transport reaches the receiver
    NEAREST = "nearest"  # the transport with the shortest distance
    NEXT = "next"  # if the transports before it refuse
    TRIAL = "trial"  # sick, and due for a trial
    LAST_RESORT = "last_resort"  # sick, and not due for a trial: only when all others refuse


@dataclass(frozen=True)
class TransportState:
    """State of a transport for one message.

    ``distance``: 0 within a host, larger for farther hosts. ``well``: the transport took its last message. ``trial``:
    it is sick, and it is time to try it again.
    """

    name: str
    distance: int
    reaches: bool = True
    well: bool = True
    trial: bool = False


@dataclass(frozen=True)
class Attempt:
    """Transport to try, and the reason."""

    name: str
    reason: RouteReason


def route(states: Sequence[TransportState]) -> tuple[Attempt, ...]:
    """Return the transports in the order in which to try them; empty if none reaches the receiver.

    1. A sick transport that is due for a trial comes first: it may have recovered.
    2. Healthy transports come before sick ones.
    3. Among healthy ones, the nearest is first.
    """
    reaching = sorted((state for state in states if state.reaches), key=lambda state: state.distance)
    well = [state for state in reaching if state.well]
    trials = [state for state in reaching if not state.well and state.trial]
    attempts = [Attempt(state.name, RouteReason.TRIAL) for state in trials[:1]]
    attempts += [Attempt(s.name, RouteReason.NEXT if place else RouteReason.NEAREST) for place, s in enumerate(well)]
    tried = {attempt.name for attempt in attempts}
    attempts += [Attempt(state.name, RouteReason.LAST_RESORT) for state in reaching if state.name not in tried]
    if len(attempts) == 1:
        return (Attempt(attempts[0].name, RouteReason.ONLY),)
    return tuple(attempts)

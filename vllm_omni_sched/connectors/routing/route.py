"""The order in which paths are tried for a message. Pure: a snapshot in, a plan out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class RouteReason(str, Enum):
    """Reason for the position of a path among those to try."""

    ONLY = "only"  # no other reaches the receiver
    QUICKEST = "quickest"  # by what was measured
    NEAREST = "nearest"  # costs of some are not known: the one with the least in between
    NEXT = "next"  # if the ones before refuse
    TRIAL = "trial"  # not measured for long, or sick: this one message finds out
    LAST_RESORT = "last_resort"  # sick, and not due for a trial: only when all others refuse


@dataclass(frozen=True)
class PathState:
    """The state of a path for one message.

    ``distance``: 0 for the same host, more with every thing in between. ``seconds``: what the message would take, put
    and got; None when not known. ``well``: it took its last message. ``trial``: it is time to try it again.
    """

    name: str
    distance: int
    reaches: bool = True
    well: bool = True
    trial: bool = False
    seconds: float | None = None


@dataclass(frozen=True)
class Attempt:
    """A path to try, and the reason."""

    path: str
    reason: RouteReason


def route(states: Sequence[PathState]) -> tuple[Attempt, ...]:
    """Paths in the order in which to try them; empty when none reaches the receiver.

    1. A path that is due for a trial comes first: what is not used is not measured, and what is sick not known well.
    2. Well paths come before sick ones.
    3. Among well ones the quickest is first if all were measured, else the nearest.
    """
    reaching = [state for state in states if state.reaches]
    trials = [state for state in reaching if state.trial]
    well = [state for state in reaching if state.well and not state.trial]
    measured = all(state.seconds is not None for state in well)
    well.sort(key=lambda state: (state.seconds or 0.0 if measured else 0.0, state.distance))
    best = RouteReason.QUICKEST if measured else RouteReason.NEAREST
    attempts = [Attempt(state.name, RouteReason.TRIAL) for state in sorted(trials, key=lambda s: s.distance)[:1]]
    attempts += [Attempt(s.name, best if not place else RouteReason.NEXT) for place, s in enumerate(well)]
    rest = [state for state in reaching if state.name not in {attempt.path for attempt in attempts}]
    attempts += [Attempt(state.name, RouteReason.LAST_RESORT) for state in sorted(rest, key=lambda s: s.distance)]
    if len(attempts) == 1:
        return (Attempt(attempts[0].path, RouteReason.ONLY),)
    return tuple(attempts)

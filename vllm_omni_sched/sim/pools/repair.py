"""Connect the pools to recovery: events in, actions out."""

import math
from typing import Protocol

from vllm_omni_sched.monitor.recovery.events import (
    Aborted,
    Action,
    Died,
    Dispatched,
    Draining,
    Drop,
    Event,
    Fail,
    Finished,
    Joined,
    Left,
    Redispatch,
    Replica,
    Restart,
    Restarted,
    Suspected,
    Tick,
)
from vllm_omni_sched.monitor.recovery.policy import Recovery
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.trip import Leg, Trip


class Hands(Protocol):
    """Carries out the actions of recovery."""

    def place_again(self, name: str, stage: int, index: int, attempt: int) -> None:
        """Run a request that lost its place on that replica."""

    def give_up(self, name: str) -> None:
        """Fail a request."""

    def start_again(self, stage: int, index: int) -> None:
        """Restart a replica."""


class Repair:
    """Passes events to `Recovery`, carries out its actions, and wakes it at the times it asks for."""

    def __init__(self, sim: Simulator, recovery: Recovery, hands: Hands) -> None:
        self.recovery = recovery
        self._sim, self._hands = sim, hands
        self._wake = math.inf

    def began(self, leg: Leg) -> None:
        """Record that a request was given to a replica; its leg gets the number of the dispatch."""
        name = leg.trip.name
        self._tell(Dispatched(name, Replica(leg.stage, leg.replica)))
        leg.attempt = self.recovery.attempt(name)

    def finished(self, trip: Trip, leg: Leg, final: bool) -> bool:
        """Record an answer, and return whether it counts."""
        if leg.trip is not trip:  # it follows the work of another request
            self._tell(Dispatched(trip.name, Replica(leg.stage, leg.replica)))
            attempt = self.recovery.attempt(trip.name)
        else:
            attempt = leg.attempt
        return self._tell(Finished(trip.name, attempt, final))

    def suspected(self, stage: int, index: int) -> None:
        """Suspect a replica, so that nothing is moved there before it counts as dead; as in `omni.stages.repair`."""
        self._tell(Suspected(Replica(stage, index), "killed"))

    def died(self, stage: int, index: int) -> None:
        """A replica is gone, with what was there; what its requests got from earlier stages is not."""
        self._tell(Died(Replica(stage, index), "killed"))
        self._ask_to_be_woken()

    def aborted(self, trip: Trip) -> None:
        self._tell(Aborted(trip.name))

    def restarted(self, stage: int, index: int) -> None:
        self._tell(Restarted(Replica(stage, index)))
        self._ask_to_be_woken()

    def joined(self, stage: int, index: int) -> None:
        self._tell(Joined(Replica(stage, index)))

    def drains(self, stage: int, index: int) -> None:
        self._tell(Draining(Replica(stage, index)))

    def left(self, stage: int, index: int) -> None:
        self._tell(Left(Replica(stage, index)))

    def coming(self, stage: int) -> bool:
        """Return whether a replica of the stage serves or may serve again soon."""
        return self.recovery.coming(stage)

    def _tell(self, event: Event) -> bool:
        actions = self.recovery.on_event(event, self._sim.now)
        counts = True
        for action in actions:
            counts = self._do(action) and counts
        return counts

    def _do(self, action: Action) -> bool:
        """Carry out an action; return False if it drops an answer."""
        match action:
            case Redispatch(name, replica, attempt, _):
                self._hands.place_again(name, replica.stage, replica.index, attempt)
            case Fail(name):
                self._hands.give_up(name)
            case Restart(replica):
                self._hands.start_again(replica.stage, replica.index)
            case Drop():
                return False
            case _:
                pass
        return True

    def _ask_to_be_woken(self) -> None:
        wake = self.recovery.next_wake()
        if wake < self._wake:
            self._wake = max(wake, self._sim.now)
            self._sim.at(self._wake, self._woken, self._wake)

    def _woken(self, when: float) -> None:
        if when == self._wake:
            self._wake = math.inf
            self._tell(Tick())
            self._ask_to_be_woken()

"""Recovery at work: what the real policy is told, and what it asks for."""

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
    """What carries out what recovery asks for."""

    def place_again(self, name: str, stage: int, index: int, attempt: int) -> None:
        """A request that lost its place is to run there."""

    def give_up(self, name: str) -> None:
        """A request is to fail."""

    def start_again(self, stage: int, index: int) -> None:
        """A replica is to be restarted."""


class Repair:
    """Tells `Recovery` what happens, carries out its actions, and wakes it when it wants that."""

    def __init__(self, sim: Simulator, recovery: Recovery, hands: Hands) -> None:
        self.recovery = recovery
        self._sim, self._hands = sim, hands
        self._wake = math.inf

    def began(self, leg: Leg) -> None:
        """A request was given to a replica; its leg gets the number of the dispatch."""
        name = leg.trip.name
        self._tell(Dispatched(name, Replica(leg.stage, leg.replica)))
        leg.attempt = self.recovery.attempt(name)

    def finished(self, trip: Trip, leg: Leg, final: bool) -> bool:
        """Whether an answer counts."""
        if leg.trip is not trip:  # the work of another one was its own, too
            self._tell(Dispatched(trip.name, Replica(leg.stage, leg.replica)))
            attempt = self.recovery.attempt(trip.name)
        else:
            attempt = leg.attempt
        return self._tell(Finished(trip.name, attempt, final))

    def suspected(self, stage: int, index: int) -> None:
        """A replica seems to be gone, and nothing is moved there; it is dead next. As in `omni.stages.repair`."""
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
        """Whether some replica of the stage serves or may serve again soon."""
        return self.recovery.coming(stage)

    def _tell(self, event: Event) -> bool:
        actions = self.recovery.on_event(event, self._sim.now)
        counts = True
        for action in actions:
            counts = self._do(action) and counts
        return counts

    def _do(self, action: Action) -> bool:
        """Whether it is not that an answer is dropped."""
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

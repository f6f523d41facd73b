"""Connect the simulated pools to the recovery policy: pass events to it, and carry out its actions."""

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
from vllm_omni_sched.sim.pools.request_run import RequestRun, StageRun


class RecoveryHandler(Protocol):
    """Carries out the actions of recovery."""

    def redispatch(self, name: str, stage: int, index: int, attempt: int) -> None:
        """Run a request that lost its replica on this one."""

    def give_up(self, name: str) -> None:
        """Fail a request."""

    def restart_replica(self, stage: int, index: int) -> None:
        """Restart a replica."""


class RecoveryDriver:
    """Passes events to `Recovery`, carries out its actions, and wakes it at the times it asks for."""

    def __init__(self, sim: Simulator, recovery: Recovery, handler: RecoveryHandler) -> None:
        self.policy = recovery
        self._sim, self._handler = sim, handler
        self._wake = math.inf

    def began(self, stage_run: StageRun) -> None:
        """Record that a request was given to a replica; ``stage_run`` gets the number of the dispatch."""
        name = stage_run.request_run.name
        self._tell(Dispatched(name, Replica(stage_run.stage, stage_run.replica)))
        stage_run.attempt = self.policy.attempt(name)

    def finished(self, run: RequestRun, stage_run: StageRun, final: bool) -> bool:
        """Record an answer, and return whether it counts."""
        if stage_run.request_run is not run:  # it follows the work of another request
            self._tell(Dispatched(run.name, Replica(stage_run.stage, stage_run.replica)))
            attempt = self.policy.attempt(run.name)
        else:
            attempt = stage_run.attempt
        return self._tell(Finished(run.name, attempt, final))

    def suspected(self, stage: int, index: int) -> None:
        """Suspect a replica, so that no request is moved there before it counts as dead, as in vLLM-Omni."""
        self._tell(Suspected(Replica(stage, index), "killed"))

    def died(self, stage: int, index: int) -> None:
        """Record that a replica and all its work are lost; outputs of earlier stages for its requests are kept."""
        self._tell(Died(Replica(stage, index), "killed"))
        self._ask_to_be_woken()

    def aborted(self, run: RequestRun) -> None:
        self._tell(Aborted(run.name))

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
        return self.policy.coming(stage)

    def _tell(self, event: Event) -> bool:
        actions = self.policy.on_event(event, self._sim.now)
        counts = True
        for action in actions:
            counts = self._do(action) and counts
        return counts

    def _do(self, action: Action) -> bool:
        """Carry out an action; return False if it drops an answer."""
        match action:
            case Redispatch(name, replica, attempt, _):
                self._handler.redispatch(name, replica.stage, replica.index, attempt)
            case Fail(name):
                self._handler.give_up(name)
            case Restart(replica):
                self._handler.restart_replica(replica.stage, replica.index)
            case Drop():
                return False
            case _:
                pass
        return True

    def _ask_to_be_woken(self) -> None:
        wake = self.policy.next_wake()
        if wake < self._wake:
            self._wake = max(wake, self._sim.now)
            self._sim.at(self._wake, self._woken, self._wake)

    def _woken(self, when: float) -> None:
        if when == self._wake:
            self._wake = math.inf
            self._tell(Tick())
            self._ask_to_be_woken()

"""Simulate a stage that the pipeline core schedules, as it does in vLLM-Omni."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.choose import InTurn
from vllm_omni_sched.sim.pools.features import work_of
from vllm_omni_sched.sim.pools.orchestration import Orchestration
from vllm_omni_sched.sim.pools.pool import Pool
from vllm_omni_sched.sim.pools.replica import Replica
from vllm_omni_sched.sim.pools.replicas import Make
from vllm_omni_sched.sim.pools.spec import StageSpec
from vllm_omni_sched.sim.pools.trip import Leg, Trip
from vllm_omni_sched.sim.server import Job


@dataclass(eq=False, kw_only=True)
class TripWork(StageWork):
    """Work of a simulated request in a stage. ``trip``: the request that leads; ``leg``: its job on a server."""

    trip: Trip
    leg: Leg | None = None


class GatedPool(Pool):
    """A stage that the core schedules: this turns what happens here into events, and the actions into jobs of servers.

    The core's rules are those of `StageScheduler`.
    """

    def __init__(self, sim: Simulator, stage: int, spec: StageSpec, make: Make, shared: Orchestration) -> None:
        self.shared = shared
        self.scheduler = shared.core.add_stage(stage, spec.at_once, ())
        self._autoregressive = spec.kind is StageKind.AR
        self._trips: dict[str, Trip] = {}  # present in this stage
        super().__init__(sim, stage, spec, make, InTurn())

    # ---- requests

    def submit(self, trip: Trip) -> None:
        if not self.live and not self.above.comes(self.stage):
            self.above.fails(trip)
            return
        self._trips[trip.name] = trip
        trip.work = work = TripWork(
            request_id=trip.name,
            stage_id=self.stage,
            known=trip.known,
            arrived=self.sim.now,
            key=self._key(trip),
            trip=trip,
        )
        if any(isinstance(one, e.Lead) for one in self.shared.handle(e.Submitted(work, trip.features[self.stage]))):
            self._do(self.shared.handle(e.Waits(work)))

    def _key(self, trip: Trip) -> Hashable | None:
        return work_of(trip.request, self.spec.kind) if self.shared.config.graph.merging.enabled else None

    def release(self) -> None:
        """Start all requests that may start now."""
        self._do(self.shared.handle(e.Tick(self.stage)))

    def _do(self, actions: Iterable[e.Action]) -> None:
        for action in actions:
            match action:
                case e.Start(TripWork() as work):
                    self._start(work)
                case e.Wake(_, at):
                    self.sim.at(at, self._woken, at)
                case e.Continued(_, name, TripWork() as heir):
                    self._inherit(self.scheduler.running[name], heir)
                case e.Stop(TripWork() as work):
                    self._stop(work)
                    self.shared.handle(e.Dropped(self.stage, work.request_id))
                case e.Gone(TripWork() as work):
                    self._stop(work)
                case _:
                    pass

    def _start(self, work: TripWork, attempt: int = 0) -> None:
        work.sent = True
        replica = self.replicas[work.replica_id]
        work.leg = leg = Leg(work.trip, self.stage, work.cost_seconds, attempt)
        leg.work = work
        self.send(leg, replica)

    def _woken(self, at: float) -> None:
        self._do(self.shared.handle(e.Woken(self.stage, at)))

    def on_first_output(self, job: Job) -> None:
        if isinstance(job, Leg) and job.trip.leg is job and not job.has_output:
            job.has_output = True
            assert job.work is not None
            self.shared.handle(e.FirstOutput(self.stage, job.work.request_id))
            self.release()  # waiting requests may have room now

    def finish(self, trip: Trip, leg: Leg, replica: Replica) -> None:
        assert leg.work is not None
        name, now = leg.work.request_id, self.sim.now
        if self._autoregressive and not leg.has_output:  # the server does not tell first outputs when they are made
            first = max(min(leg.first, now) - leg.submitted, 0.0)
            self.shared.handle(e.FirstOutput(self.stage, name, first))
        for action in self.shared.handle(e.Finished(self.stage, name)):
            if isinstance(action, e.Ended):
                for receiver in action.receivers:
                    self.above.finished(self._trips.pop(receiver), leg)
        self.release()

    # ---- those that leave, and deaths

    def withdraw(self, trip: Trip) -> None:
        if self._trips.pop(trip.name, None) is not None:
            self._do(self.shared.handle(e.Detached(self.stage, trip.name)))
            self._do(self.shared.handle(e.Dropped(self.stage, trip.name)))
        self.release()

    def _inherit(self, work: StageWork, heir: TripWork) -> None:
        """Let running work go on for another request."""
        assert isinstance(work, TripWork)
        leg = work.leg
        assert leg is not None
        work.trip.leg = None
        work.trip = leg.trip = heir.trip
        heir.trip.work, heir.trip.leg, leg.attempt = work, leg, 0
        if self.tells_of_each:
            self.above.began(leg)

    def _stop(self, work: TripWork) -> None:
        if work.leg is not None and work.trip.leg is work.leg:
            self.stop(work.leg)

    def placed(self, trip: Trip, index: int, attempt: int) -> None:
        assert isinstance(trip.work, TripWork)
        for action in self.shared.handle(e.Placed(trip.work, index)):
            if isinstance(action, e.Start):
                self._start(trip.work, attempt)

    def notice(self, index: int) -> list[Trip]:
        lost = super().notice(index)
        self.shared.handle(e.ReplicaDied(self.stage, index))
        return lost

    def _serve(self, replica: Replica) -> None:
        super()._serve(replica)
        self.shared.handle(e.ReplicaUp(self.stage, replica.index))

    def _stop_sending(self, replica: Replica) -> None:
        super()._stop_sending(replica)
        self.shared.handle(e.ReplicaDraining(self.stage, replica.index))

    def _leave_if_empty(self, replica: Replica) -> None:
        super()._leave_if_empty(replica)
        if replica.index not in self.replicas:
            self.shared.handle(e.ReplicaGone(self.stage, replica.index))

    @property
    def request_seconds(self) -> float | None:
        return self.scheduler.request_seconds

    @property
    def present(self) -> int:
        return super().present + len(self.scheduler.waiting)

    def next_waiting(self) -> Trip | None:
        """Return a request that waits; None if none does."""
        name = next(iter(self.scheduler.waiting), None)
        return None if name is None else self._trips[name]

    def raise_limits(self, limit: int) -> None:
        """Raise the batch limits for a load that is to come."""
        self.shared.handle(e.LimitsRaised(self.stage, limit))
        self.release()

    @property
    def batch_limit(self) -> int:
        """Return the smallest limit of its replicas."""
        return self.scheduler.batch_limit

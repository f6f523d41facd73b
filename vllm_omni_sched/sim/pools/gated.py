"""Simulate a stage with the policies of the orchestrator: queue, gate, and identical work that runs once."""

from collections.abc import Callable, Hashable

from vllm_omni_sched.graph.merging import Merger, Role
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.balance import ReplicaState
from vllm_omni_sched.resource.pid import PidBatch
from vllm_omni_sched.resource.replica_index import ReplicaIndex, drawn, draws
from vllm_omni_sched.resource.stage_gate import StageGate
from vllm_omni_sched.resource.stage_limits import control_of, units_of, window_of
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.choose import InTurn
from vllm_omni_sched.sim.pools.entrance import Entrance
from vllm_omni_sched.sim.pools.features import work_of
from vllm_omni_sched.sim.pools.load import Load
from vllm_omni_sched.sim.pools.policies import Policies
from vllm_omni_sched.sim.pools.pool import Pool
from vllm_omni_sched.sim.pools.replica import Replica
from vllm_omni_sched.sim.pools.replicas import Make
from vllm_omni_sched.sim.pools.spec import StageSpec
from vllm_omni_sched.sim.pools.trip import Leg, Trip
from vllm_omni_sched.sim.server import Job

LEAD_SECONDS = 0.06  # for a request to get from the orchestrator to an engine


class GatedPool(Pool):
    """A stage under the orchestrator's policies; rules as in `omni.stages.queue` and `omni.stages.stage_policies`.

    1. A request whose work is already in flight follows it, and gets the output together with the leader.
    2. Otherwise it waits until the gate releases it to a replica: the gate is asked when a request comes or ends, when
       a later stage has room again, and when a batching window is over.
    3. The order is that of `PathOrder`; without priorities it is the order of arrival.
    4. Batch limits are controlled by the time to the first output in an autoregressive stage, and to the end of the
       request in others.
    5. Of many replicas a few are drawn for each request, by the same rules (`replica_index.drawn`); others are not
       examined.
    6. Work goes on while any request needs it: when the request it was begun for leaves, its oldest follower takes it.
    """

    def __init__(self, sim: Simulator, stage: int, spec: StageSpec, make: Make, shared: Policies) -> None:
        config = shared.config
        self.shared = shared
        self._limits = config.batching.of_stage(stage, spec.name)
        self._first_output = spec.kind is StageKind.AR
        self._window = window_of(config.batching, self._limits)  # only tells what is long
        priority = config.graph.priority
        self.gate = StageGate(
            shared.balancer(),
            # a stage that admits requests at each step gains nothing by waiting
            max_hold_seconds=0.0 if self._first_output else self._limits.hold_ms / 1e3,
            min_share=priority.min_low_share if priority.enabled else 0.0,
            order=shared.waiting_order(),
        )
        self.merger: Merger = Merger(config.graph.merging.max_followers)
        self._parked: dict[str, Trip] = {}  # followers
        self._asked_at = float("inf")  # time of the next call of the gate, if nothing happens before
        self._releasing = False
        self._index = ReplicaIndex()  # of replicas that may get requests
        super().__init__(sim, stage, spec, make, InTurn(), shared.costs)
        self.entrance = Entrance(shared, stage, self.gate, self._long_units)
        self.waiting = self.entrance.waiting

    def new_load(self) -> Load | None:
        batching = self.shared.config.batching
        return Load(control_of(batching, self._limits, self.spec.at_once), window_of(batching, self._limits))

    # ---- requests

    def submit(self, trip: Trip) -> None:
        name, stage, credits = trip.name, str(self.stage), self.shared.credits
        if not self.live and not self.above.comes(self.stage):
            self.above.fails(trip)
            return
        if self.merger.members(name):  # it comes again, after a death, and keeps its followers
            self._wait(trip)
            return
        joined = self.merger.join(self._key(trip), name)
        if credits is not None:
            if joined.role is Role.FOLLOW:  # another request's work takes the place here
                credits.give_back(name, stage)
            if trip.position and credits.has_started(name, before := str(trip.path[trip.position - 1])):
                credits.hand_over(name, before, stage)
        if joined.role is Role.FOLLOW:
            self._parked[name] = trip
        else:
            self._wait(trip)

    def _key(self, trip: Trip) -> Hashable | None:
        return work_of(trip.request, self.spec.kind) if self.shared.config.graph.merging.enabled else None

    def _wait(self, trip: Trip) -> None:
        self.estimate(trip)
        self.entrance.put(trip, self.sim.now)
        self.release()

    def release(self) -> None:
        """Start all requests that may go now."""
        if self._releasing:
            return
        self._releasing = True
        try:
            while self.waiting and self._release_some():
                pass
        finally:
            self._releasing = False

    def _release_some(self) -> bool:
        now = self.sim.now
        describe: Callable[[int], ReplicaState | None] | None = None
        if draws(len(self.replicas), self.gate.balancer):
            describe = self._described
            states = drawn(self._index, self._described, self.shared.dice)
        else:
            found = (self._described(each.index) for each in self.live)
            states = [one for one in found if one is not None and one.room]
        if not states:
            return False
        plan, released = self.entrance.release(now, states, describe)
        if plan.wake_at is not None and plan.wake_at < self._asked_at:
            self._asked_at = max(plan.wake_at, now)
            self.sim.at(self._asked_at, self._asked, self._asked_at)
        for trip, index in released:
            self.begin(trip, self.replicas[index], trip.costs[self.stage])
        return bool(released)

    def _asked(self, when: float) -> None:
        if when == self._asked_at:
            self._asked_at = float("inf")
            self.release()

    def _described(self, index: int) -> ReplicaState | None:
        """Return a replica as the gate sees it; None if it should get no request.

        Its limit is one higher when a place is about to be free, which would otherwise be empty until the next
        request comes. If replicas are drawn, each gets at most one request, so that applies to full ones only.
        """
        if index not in self._index:
            return None
        load, now = self.replicas[index].load, self.sim.now
        assert load is not None
        assert load.limit is not None
        window, running, limit = load.window, len(load), load.limit.limit
        if running >= limit or not draws(len(self.replicas), self.gate.balancer):
            limit += int(self._first_output and load.next_end_seconds(now) <= LEAD_SECONDS)
        return ReplicaState(
            index,
            load.remaining_seconds(now),
            running,
            limit,
            units=window.running if window is not None else 0,
            units_limit=window.units if window is not None else None,
        )

    def _changed(self, replica: Replica) -> None:
        """Update a replica whose load or limit has changed."""
        if replica.load is not None and replica.load.limit is not None and replica.index in self._index:
            self._index.put(replica.index, len(replica.load), replica.load.limit.limit)

    def _serve(self, replica: Replica) -> None:
        super()._serve(replica)
        assert replica.load is not None
        assert replica.load.limit is not None
        self._index.put(replica.index, len(replica.load), replica.load.limit.limit)

    def _stop_sending(self, replica: Replica) -> None:
        super()._stop_sending(replica)
        self._index.remove(replica.index)

    def _units(self, trip: Trip) -> int:
        return units_of(self.spec.kind, trip.features[self.stage])

    def _long_units(self, trip: Trip) -> int:
        return self._window.counted(self._units(trip)) if self._window is not None else 0

    def load_begins(self, leg: Leg, load: Load) -> None:
        trip = leg.trip
        load.begin(leg, self.sim.now, self._units(trip))
        self._changed(self.replicas[leg.replica])
        trip.replicas[self.stage] = leg.replica
        book = self.shared.affinity[self.stage]
        if book is not None and trip.keys:
            book.note(leg.replica, trip.keys)

    def spoke(self, job: Job) -> None:
        if isinstance(job, Leg) and job.trip.leg is job and not job.spoke:
            job.spoke = True
            load = self.replicas[job.replica].load
            if self._first_output and load is not None:
                load.through(job, self.sim.now, self.sim.now - job.submitted)
                self._changed(self.replicas[job.replica])
            self.release()  # waiting requests may have room now

    def finish(self, trip: Trip, leg: Leg, replica: Replica, load: Load) -> None:
        now = self.sim.now
        if not self._first_output:
            load.through(leg, now, now - leg.submitted)
        elif not leg.spoke:
            load.through(leg, now, max(min(leg.first, now) - leg.submitted, 0.0))
        self.learn(trip, leg, load)
        self._changed(replica)
        followers = [self._parked.pop(name) for name in self.merger.finish(trip.name)]
        if self.shared.credits is not None:
            self.shared.credits.give_back(trip.name, str(self.stage))
        for one in (trip, *followers):
            one.replicas[self.stage] = leg.replica
            self.above.finished(one, leg)
        self.release()

    # ---- those that leave, and deaths

    def withdraw(self, trip: Trip) -> None:
        self._parked.pop(trip.name, None)
        promoted = self.merger.leave(trip.name).promoted
        heir = None if promoted is None else self._parked.pop(promoted)
        leg = trip.leg
        if heir is not None and leg is not None and leg.stage == self.stage:  # the work goes on for another request
            self._inherit(leg, heir)
            return
        self.entrance.remove(trip.name)
        super().withdraw(trip)
        if leg is not None and leg.stage == self.stage and leg.replica in self.replicas:
            self._changed(self.replicas[leg.replica])
        if heir is not None:
            self._wait(heir)
        self.release()

    def _inherit(self, leg: Leg, heir: Trip) -> None:
        leg.trip.leg = None
        leg.trip, heir.leg, leg.attempt = heir, leg, 0
        if self.tells_of_each:
            self.above.began(leg)

    def placed(self, trip: Trip, index: int, attempt: int) -> None:
        if not self.merger.members(trip.name):  # its group has ended here
            self.merger.join(None, trip.name)
        self.entrance.remove(trip.name)
        self.estimate(trip)
        self.begin(trip, self.replicas[index], trip.costs[self.stage], attempt)

    def notice(self, index: int) -> list[Trip]:
        book = self.shared.affinity[self.stage]
        if book is not None:  # its caches are lost
            book.forget(index)
        return super().notice(index)

    def _leave_if_empty(self, replica: Replica) -> None:
        super()._leave_if_empty(replica)
        book = self.shared.affinity[self.stage]
        if book is not None and replica.index not in self.replicas:
            book.forget(replica.index)

    @property
    def present(self) -> int:
        return super().present + len(self.waiting)

    def raise_limits(self, limit: int) -> None:
        """Raise the batch limits for a load that is to come."""
        for replica in self.replicas.values():
            if replica.load is not None and isinstance(replica.load.limit, PidBatch):
                replica.load.limit.raise_to(limit)
                self._changed(replica)
        self.release()

    @property
    def batch_limit(self) -> int:
        """Return the smallest limit of its replicas."""
        limits = [one.load.limit.limit for one in self.replicas.values() if one.load is not None and one.load.limit]
        return min(limits, default=1)

"""A stage and its replicas."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.stage_cost import StageCosts
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.choose import Chooser, index_of
from vllm_omni_sched.sim.pools.features import features_of
from vllm_omni_sched.sim.pools.load import Load
from vllm_omni_sched.sim.pools.replica import Replica
from vllm_omni_sched.sim.pools.trip import Leg, Trip
from vllm_omni_sched.sim.server import Done, Job, Server
from vllm_omni_sched.sim.work import Request

Make = Callable[[int, Done], Server]
"""A new server for the replica of that index, which calls what it is given when a job is done."""

SMOOTHING = 0.1  # what the last request counts


@dataclass(frozen=True)
class StageSpec:
    """A stage.

    ``at_once``: requests that a replica can work on at a time. ``startup_seconds``: of a replica that is added.
    ``devices``: of each replica. ``work``: of a request, what is done here; None: all that it says.

    Raises:
        ConfigError: a number is out of its range.
    """

    name: str
    kind: StageKind = StageKind.GENERATION
    replicas: int = 1
    at_once: int = 256
    startup_seconds: float = 0.0
    devices: int = 1
    work: Callable[[Request], Request] | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "at_once", "devices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"stage {self.name}: {name} must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.startup_seconds < float("inf"):
            raise ConfigError(f"stage {self.name}: startup_seconds must be 0 or more, got {self.startup_seconds}")


class Above(Protocol):
    """What a pool tells the pipeline."""

    def began(self, leg: Leg) -> None:
        """A request was given to a replica."""

    def finished(self, trip: Trip, leg: Leg) -> None:
        """A stage is done with a request; ``leg``: whose output it has, its own or that of identical work."""

    def fails(self, trip: Trip) -> None:
        """There is nobody to work on a request, and will not be."""

    def comes(self, stage: int) -> bool:
        """Whether a replica of a stage is there, or will be."""

    def joined(self, stage: int, index: int) -> None:
        """A new replica can take requests."""

    def leaves(self, stage: int, index: int) -> None:
        """A replica was stopped, empty."""


class Pool:
    """A stage without orchestration: each request goes to a replica at once, which one says a `Chooser`.

    1. A replica that died is sent requests until that is noticed; they are lost with those that it had.
    2. A request for which no replica is there fails.
    3. A replica that drains gets no request, and leaves when it is empty.

    Args:
        stage: its number, the index of the pool in the pipeline.
        costs: to estimate what requests take, and to learn it; None: nobody needs that.
        loads: whether the work that each replica has left is followed: what balancing by cost and forecasts need.
    """

    def __init__(
        self,
        sim: Simulator,
        stage: int,
        spec: StageSpec,
        make: Make,
        chooser: Chooser,
        costs: StageCosts | None = None,
    ) -> None:
        self.spec, self.stage = spec, stage
        self.sim, self.costs = sim, costs
        self.above: Above
        self.tells_of_each = False  # of each dispatch
        self.live: list[Replica] = []  # that may get requests, by index
        self.replicas: dict[int, Replica] = {}
        self.request_seconds: float | None = None  # of a replica's time that a request takes
        self.done_requests = 0
        self._make, self._chooser = make, chooser
        self._next_index = 0
        self._starting = 0
        self._past: Counter[str] = Counter()  # busy seconds of servers that are gone
        self._held_seconds, self._held_since = 0.0, sim.now
        for _ in range(spec.replicas):
            self._serve(self._new())

    # ---- requests

    def submit(self, trip: Trip) -> None:
        """A request has come to the stage."""
        live = self.live
        if not live:
            self.above.fails(trip)
            return
        cost = 0.0 if self.costs is None else self.estimate(trip)
        self.begin(trip, self._chooser.choose(cost, live, self.sim.now), cost)

    def estimate(self, trip: Trip) -> float:
        """Seconds that it should take here."""
        assert self.costs is not None
        features = trip.features.get(self.stage)
        if features is None:
            features = trip.features[self.stage] = features_of(trip.request, self.spec.kind)
        cost = trip.costs[self.stage] = self.costs.estimate(str(self.stage), features)
        return cost

    def begin(self, trip: Trip, replica: Replica, cost_seconds: float, attempt: int = 0) -> Leg:
        """Give a request to a replica, now. ``attempt``: its number, if recovery has dispatched it."""
        leg = Leg(trip, self.stage, cost_seconds, attempt)
        leg.replica = replica.index
        leg.submitted = self.sim.now
        if self.spec.work is not None:
            leg.request = self.spec.work(trip.request)
        trip.leg = leg
        replica.in_flight += 1
        replica.pending_seconds += cost_seconds
        if replica.load is not None:
            self.load_begins(leg, replica.load)
        trip.attempts += 1
        if self.tells_of_each:
            self.above.began(leg)
        if replica.server is None:
            replica.limbo.append(leg)
        else:
            replica.server.submit(leg)
        return leg

    def load_begins(self, leg: Leg, load: Load) -> None:
        load.begin(leg, self.sim.now)

    def _done(self, job: Job) -> None:
        assert isinstance(job, Leg)
        replica, trip = self.replicas[job.replica], job.trip
        trip.leg = None
        replica.in_flight -= 1
        replica.pending_seconds -= job.cost_seconds
        self.done_requests += 1
        if replica.load is None:
            self.above.finished(trip, job)
        else:
            self.finish(trip, job, replica, replica.load)
        if replica.draining:
            self._leave_if_empty(replica)

    def _ended(self, leg: Leg, replica: Replica) -> None:
        leg.trip.leg = None
        replica.in_flight -= 1
        replica.pending_seconds -= leg.cost_seconds

    def finish(self, trip: Trip, leg: Leg, replica: Replica, load: Load) -> None:
        """A server is done with a request."""
        self.learn(trip, leg, load)
        self.above.finished(trip, leg)

    def learn(self, trip: Trip, leg: Leg, load: Load) -> float | None:
        """The seconds that a request had of its replica, which costs are learnt from."""
        share = load.end(leg, self.sim.now)
        if share is not None and self.costs is not None:
            self.costs.observe(str(self.stage), trip.features[self.stage], share)
            before = share if self.request_seconds is None else self.request_seconds
            self.request_seconds = before + SMOOTHING * (share - before)
        return share

    def spoke(self, job: Job) -> None:
        """A server has the first output of a job. It need not say so: that is then known when the job is done."""

    def withdraw(self, trip: Trip) -> None:
        """A request leaves before its end: take it back from wherever it is."""
        leg = trip.leg
        if leg is None or leg.stage != self.stage:
            return
        replica = self.replicas[leg.replica]
        if replica.load is not None:
            replica.load.end(leg, self.sim.now)
        self._ended(leg, replica)
        if replica.server is None:
            replica.limbo.remove(leg)
        else:
            replica.server.abort(leg)
        if replica.draining:
            self._leave_if_empty(replica)

    def placed(self, trip: Trip, index: int, attempt: int) -> None:
        """Recovery has given a request its place."""
        self.begin(trip, self.replicas[index], trip.costs.get(self.stage, 0.0), attempt)

    # ---- replicas

    @property
    def held(self) -> int:
        """Replicas that hold their devices: with those that start, are dead, or drain."""
        return len(self.replicas) + self._starting

    @property
    def target(self) -> int:
        """Replicas that are there or come, without those that are to leave."""
        return self.held - sum(one.draining for one in self.replicas.values())

    @property
    def starting(self) -> int:
        """Replicas that were added, and are not there yet."""
        return self._starting

    @property
    def present(self) -> int:
        """Requests in this stage."""
        return sum(one.in_flight for one in self.replicas.values())

    def replica_seconds(self) -> float:
        """That replicas were held so far, together; times ``spec.devices`` these are device seconds."""
        self._count_held()
        return self._held_seconds

    def busy_seconds(self) -> dict[str, float]:
        """Device seconds so far by what they went to, of all replicas there were."""
        total = Counter(self._past)
        for replica in self.replicas.values():
            if replica.server is not None:
                total.update(replica.server.busy_seconds())
        return dict(total)

    def kill(self, index: int) -> bool:
        """A replica dies, which nobody notices yet; whether it was alive."""
        replica = self.replicas.get(index)
        if replica is None or replica.server is None:
            return False
        lost = replica.server.kill()
        self._past.update(replica.server.busy_seconds())
        replica.server = None
        replica.limbo = [job for job in lost if isinstance(job, Leg)]
        return True

    def notice(self, index: int) -> list[Trip]:
        """The death of a replica is noticed: who is lost with it, in the order in which they came."""
        replica = self.replicas.get(index)
        if replica is None:
            return []  # it drained, and what it had was taken back
        self._stop_sending(replica)
        lost, replica.limbo = replica.limbo, []
        for leg in lost:
            self._ended(leg, replica)
        if replica.load is not None:
            replica.load = self.new_load()
        replica.draining = False  # to die before it has left is to die as others do
        return [leg.trip for leg in lost]

    def restart(self, index: int) -> None:
        """A dead replica is there again."""
        replica = self.replicas.get(index)
        if replica is not None and replica.server is None:
            self._serve(replica)

    def add(self) -> None:
        """Start one more replica; it is there after ``startup_seconds``."""
        self._count_held()
        self._starting += 1
        self.sim.after(self.spec.startup_seconds, self._started)

    def _started(self, _: None) -> None:
        self._count_held()
        self._starting -= 1
        replica = self._new()
        self._serve(replica)
        self.above.joined(self.stage, replica.index)

    def drain(self) -> int | None:
        """The idlest replica, of several the newest, gets no more requests, and leaves when it is empty; which one.

        None where there is only one left.
        """
        alive = [one for one in self.live if one.server is not None]
        if len(alive) < 2:
            return None
        chosen = min(reversed(alive), key=lambda one: one.in_flight)
        chosen.draining = True
        self._stop_sending(chosen)
        return chosen.index

    def drained(self, index: int) -> None:
        """To be called after `drain`, when everybody has been told."""
        self._leave_if_empty(self.replicas[index])

    def _leave_if_empty(self, replica: Replica) -> None:
        if replica.in_flight or replica.index not in self.replicas:
            return
        self._count_held()
        del self.replicas[replica.index]
        if replica.server is not None:
            self._past.update(replica.server.busy_seconds())
        self.above.leaves(self.stage, replica.index)

    def new_load(self) -> Load | None:
        """To follow the work of a replica with."""
        return None if self.costs is None else Load()

    def _new(self) -> Replica:
        self._count_held()
        replica = Replica(self._next_index, None, self.new_load())
        self._next_index += 1
        self.replicas[replica.index] = replica
        return replica

    def _serve(self, replica: Replica) -> None:
        replica.server = self._make(replica.index, self._done)
        at = bisect_left(self.live, replica.index, key=index_of)
        if at == len(self.live) or self.live[at] is not replica:
            self.live.insert(at, replica)

    def _stop_sending(self, replica: Replica) -> None:
        if replica in self.live:
            self.live.remove(replica)

    def _count_held(self) -> None:
        now = self.sim.now
        self._held_seconds += self.held * (now - self._held_since)
        self._held_since = now

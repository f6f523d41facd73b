"""Simulate a stage and its requests."""

from vllm_omni_sched.resource.stage_cost import StageCosts
from vllm_omni_sched.resource.work_left import WorkLeft
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.choose import Chooser
from vllm_omni_sched.sim.pools.features import features_of
from vllm_omni_sched.sim.pools.replica import Replica
from vllm_omni_sched.sim.pools.replicas import Make, Replicas
from vllm_omni_sched.sim.pools.spec import StageSpec
from vllm_omni_sched.sim.pools.trip import Leg, Trip
from vllm_omni_sched.sim.server import Job

SMOOTHING = 0.1  # weight of the last request


class Pool(Replicas):
    """A stage without orchestration: a `Chooser` sends each request to a replica at once.

    1. A dead replica gets requests until its death is noticed; they are lost with those that it had.
    2. A request fails if there is no replica.
    3. A draining replica gets no request, and leaves when it is empty.

    Args:
        stage: index of the pool in the pipeline.
        costs: to estimate and learn the costs of requests; None: not needed.
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
        self.costs = costs
        self.tells_of_each = False  # of each dispatch
        self._request_seconds: float | None = None
        self.done_requests = 0
        self._chooser = chooser
        super().__init__(sim, stage, spec, make)

    @property
    def request_seconds(self) -> float | None:
        """Return the smoothed replica time of a request; None before any was timed."""
        return self._request_seconds

    def new_load(self) -> WorkLeft[Leg] | None:
        return None if self.costs is None else WorkLeft()

    def submit(self, trip: Trip) -> None:
        """Submit a request that has come to the stage."""
        live = self.live
        if not live:
            self.above.fails(trip)
            return
        cost = 0.0 if self.costs is None else self.estimate(trip)
        self.begin(trip, self._chooser.choose(cost, live, self.sim.now), cost)

    def estimate(self, trip: Trip) -> float:
        """Return the estimated seconds of a request in this stage."""
        assert self.costs is not None
        features = trip.features.get(self.stage)
        if features is None:
            features = trip.features[self.stage] = features_of(trip.request, self.spec.kind)
        cost = trip.costs[self.stage] = self.costs.estimate(str(self.stage), features)
        return cost

    def begin(self, trip: Trip, replica: Replica, cost_seconds: float, attempt: int = 0) -> None:
        """Give a request to a replica now. ``attempt``: its number, if recovery has dispatched it."""
        self.send(Leg(trip, self.stage, cost_seconds, attempt), replica)

    def send(self, leg: Leg, replica: Replica) -> None:
        """Send a job to a replica."""
        trip = leg.trip
        leg.replica = replica.index
        leg.submitted = self.sim.now
        if self.spec.work is not None:
            leg.request = self.spec.work(trip.request)
        trip.leg = leg
        replica.in_flight += 1
        replica.pending_seconds += leg.cost_seconds
        if replica.load is not None:
            replica.load.add(leg, leg.cost_seconds, self.sim.now)
        trip.attempts += 1
        if self.tells_of_each:
            self.above.began(leg)
        if replica.server is None:
            replica.limbo.append(leg)
        else:
            replica.server.submit(leg)

    def _done(self, job: Job) -> None:
        assert isinstance(job, Leg)
        replica, trip = self.replicas[job.replica], job.trip
        trip.leg = None
        replica.in_flight -= 1
        replica.pending_seconds -= job.cost_seconds
        self.done_requests += 1
        self.finish(trip, job, replica)
        if replica.draining:
            self._leave_if_empty(replica)

    def finish(self, trip: Trip, leg: Leg, replica: Replica) -> None:
        """Record that a server is done with a request, and learn the costs from the seconds that it had there."""
        share = None if replica.load is None else replica.load.take(leg, self.sim.now)
        if share is not None and self.costs is not None:
            self.costs.observe(str(self.stage), trip.features[self.stage], share)
            before = share if self._request_seconds is None else self._request_seconds
            self._request_seconds = before + SMOOTHING * (share - before)
        self.above.finished(trip, leg)

    def on_first_output(self, job: Job) -> None:
        """Record the first output of a job. A server need not call this: the time is then known when the job ends."""

    def withdraw(self, trip: Trip) -> None:
        """Withdraw a request that leaves before its end from its replica."""
        if trip.leg is not None and trip.leg.stage == self.stage:
            self.stop(trip.leg)

    def stop(self, leg: Leg) -> None:
        """Stop a job before its end."""
        replica = self.replicas[leg.replica]
        if replica.load is not None:
            replica.load.take(leg, self.sim.now)
        self._ended(leg, replica)
        if replica.server is None:
            replica.limbo.remove(leg)
        else:
            replica.server.abort(leg)
        if replica.draining:
            self._leave_if_empty(replica)

    def placed(self, trip: Trip, index: int, attempt: int) -> None:
        """Run a request where recovery has placed it."""
        self.begin(trip, self.replicas[index], trip.costs.get(self.stage, 0.0), attempt)

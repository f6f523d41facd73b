"""Simulate a stage and its requests."""

from vllm_omni_sched.resource.pipeline.stage_cost import StageCosts
from vllm_omni_sched.resource.pipeline.work_left import WorkLeft
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.choose import Chooser
from vllm_omni_sched.sim.pools.replicas import Make, Replica, Replicas, StageSpec
from vllm_omni_sched.sim.pools.request_run import RequestRun, StageRun, features_of
from vllm_omni_sched.sim.server import Job

SMOOTHING = 0.1  # weight of the last request


class Pool(Replicas):
    """Simulates a stage without orchestration: a `Chooser` sends each request to a replica at once.

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
        self._request_seconds: float | None = None
        self.done_requests = 0
        self._chooser = chooser
        super().__init__(sim, stage, spec, make)

    @property
    def request_seconds(self) -> float | None:
        """Return the smoothed replica time of a request; None before any was timed."""
        return self._request_seconds

    def new_load(self) -> WorkLeft[StageRun] | None:
        return None if self.costs is None else WorkLeft()

    def submit(self, run: RequestRun) -> None:
        """Submit a request that has come to the stage."""
        live = self.live
        if not live:
            self.events.fail_stage(run, self.stage)
            return
        cost = 0.0 if self.costs is None else self.estimate(run)
        self.begin(run, self._chooser.choose(cost, live, self.sim.now), cost)

    def estimate(self, run: RequestRun) -> float:
        """Return the estimated seconds of a request in this stage."""
        assert self.costs is not None
        features = run.features.get(self.stage)
        if features is None:
            features = run.features[self.stage] = features_of(run.request, self.spec.kind)
        cost = run.costs[self.stage] = self.costs.estimate(str(self.stage), features)
        return cost

    def begin(self, run: RequestRun, replica: Replica, cost_seconds: float) -> None:
        """Give a request to a replica now."""
        self.send(StageRun(run, self.stage, cost_seconds), replica)

    def send(self, stage_run: StageRun, replica: Replica) -> None:
        """Send a job to a replica."""
        run = stage_run.request_run
        stage_run.replica = replica.index
        stage_run.submitted = self.sim.now
        if self.spec.work is not None:
            stage_run.request = self.spec.work(run.request)
        run.stage_runs[self.stage] = stage_run
        replica.in_flight += 1
        replica.pending_seconds += stage_run.cost_seconds
        if replica.load is not None:
            replica.load.add(stage_run, stage_run.cost_seconds, self.sim.now)
        if self.stage in run.dispatched:
            run.repeats += 1
        else:
            run.dispatched.add(self.stage)
        if replica.server is None:
            replica.stranded.append(stage_run)
        else:
            replica.server.submit(stage_run)

    def _done(self, job: Job) -> None:
        assert isinstance(job, StageRun)
        replica, run = self.replicas[job.replica], job.request_run
        run.stage_runs.pop(self.stage, None)
        replica.in_flight -= 1
        replica.pending_seconds -= job.cost_seconds
        self.done_requests += 1
        self.finish(run, job, replica)
        if replica.draining:
            self._leave_if_empty(replica)

    def finish(self, run: RequestRun, stage_run: StageRun, replica: Replica) -> None:
        """Record that a server is done with a request, and learn the costs from the seconds that it had there."""
        share = None if replica.load is None else replica.load.take(stage_run, self.sim.now)
        if share is not None and self.costs is not None:
            self.costs.observe(str(self.stage), run.features[self.stage], share)
            before = share if self._request_seconds is None else self._request_seconds
            self._request_seconds = before + SMOOTHING * (share - before)
        self.events.finished(run, stage_run, run.flow.finished(self.stage))

    def on_first_output(self, job: Job) -> None:
        """Record the first output of a job. A server need not call this: the time is then known when the job ends."""

    def withdraw(self, run: RequestRun) -> None:
        """Withdraw a request that leaves before its end from its replica."""
        stage_run = run.stage_runs.get(self.stage)
        if stage_run is not None:
            self.stop(stage_run)

    def stop(self, stage_run: StageRun) -> None:
        """Stop a job before its end."""
        replica = self.replicas[stage_run.replica]
        if replica.load is not None:
            replica.load.take(stage_run, self.sim.now)
        self._ended(stage_run, replica)
        if replica.server is None:
            replica.stranded.remove(stage_run)
        else:
            replica.server.abort(stage_run)
        if replica.draining:
            self._leave_if_empty(replica)

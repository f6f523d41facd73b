"""Simulate a stage: its requests, and its replicas, which start, die, come back, and leave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random  # noqa: TID251 (the type of an argument)
from typing import TYPE_CHECKING, Protocol

from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.pipeline.balance import Balancer, LazyReplicas
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_cost import StageCosts
from vllm_omni_sched.resource.pipeline.work_left import WorkLeft
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.requests import RequestRun, StageRun, features_of
from vllm_omni_sched.sim.work import Done, Job, Request, Server

if TYPE_CHECKING:
    from vllm_omni_sched.sim.pools.pipeline import Pipeline


@dataclass(frozen=True)
class StageSpec:
    """Defines a stage and its replicas.

    ``at_once``: requests that a replica can run at a time. ``startup_seconds``: of a replica that is added.
    ``devices``: of each replica. ``work``: adapts a request to the stage; None: it is used as it is.
    """

    name: str
    kind: StageKind = StageKind.GENERATION
    replicas: int = 1
    at_once: int = 256
    startup_seconds: float = 0.0
    devices: int = 1
    work: Callable[[Request], Request] | None = None


@dataclass(slots=True, eq=False)
class Replica:
    """Represents a replica of a stage.

    ``server``: None while it is dead or starts. ``stranded``: requests that it had when it died, or got since; it gets
    more until the death is noticed. ``pending_seconds``: sum of the estimates of its requests. ``load``: None if it is
    not needed, or the pipeline core has it.
    """

    index: int
    server: Server | None
    load: WorkLeft[StageRun] | None = None
    in_flight: int = 0
    pending_seconds: float = 0.0
    stranded: list[StageRun] = field(default_factory=list)
    draining: bool = False


def index_of(replica: Replica) -> int:
    """Return the index, to sort and to search by."""
    return replica.index


Make = Callable[[int, Done], Server]
"""Makes a server for the replica of that index; the server calls ``done`` for each finished job."""


class Replicas(ABC):
    """Tracks the replicas of a stage, by index; a subclass passes on the finished jobs of their servers.

    1. A dead replica holds its devices, and gets requests until its death is noticed.
    2. A draining replica gets no request, and leaves when it is empty.

    ``deaths``, ``added``, ``gone``: numbers of replicas so far. ``serving_seconds``: total of replicas that could work;
    ``empty_seconds``: without any that could.
    """

    def __init__(self, sim: Simulator, stage: int, spec: StageSpec, make: Make) -> None:
        self.sim, self.stage, self.spec = sim, stage, spec
        self.events: Pipeline
        self.live: list[Replica] = []  # those that may get requests, by index
        self.replicas: dict[int, Replica] = {}
        self._make = make
        self._next_index = 0
        self._starting = 0
        self._past: Counter[str] = Counter()  # busy seconds of servers that are gone
        self.deaths = self.added = self.gone = 0
        self.serving_seconds = self.empty_seconds = 0.0
        self._held_seconds, self._held_since = 0.0, sim.now
        for _ in range(spec.replicas):
            self._serve(self._new())

    def new_load(self) -> WorkLeft[StageRun] | None:
        """Return an object to track the work of a replica; None if it is not needed."""
        return None

    @abstractmethod
    def _done(self, job: Job) -> None:
        """Record that a server is done with a job."""

    def _ended(self, stage_run: StageRun, replica: Replica) -> None:
        stage_run.request_run.stage_runs.pop(stage_run.stage, None)
        replica.in_flight -= 1
        replica.pending_seconds -= stage_run.cost_seconds

    @property
    def held(self) -> int:
        """Return the number of replicas that hold devices, including those that start, are dead, or drain."""
        return len(self.replicas) + self._starting

    @property
    def target(self) -> int:
        """Return the number of replicas that exist or start, without those that drain."""
        return self.held - sum(one.draining for one in self.replicas.values())

    @property
    def serving(self) -> int:
        """Return the number of replicas that can work now."""
        return sum(one.server is not None for one in self.replicas.values())

    @property
    def starting(self) -> int:
        """Return the number of replicas that were added and have not started yet."""
        return self._starting

    @property
    def present(self) -> int:
        """Return the number of requests in this stage."""
        return sum(one.in_flight for one in self.replicas.values())

    def replica_seconds(self) -> float:
        """Return the total seconds that replicas were held so far; times ``spec.devices`` these are device seconds."""
        self._count_held()
        return self._held_seconds

    def busy_seconds(self) -> dict[str, float]:
        """Return the device seconds so far by kind of work, of all replicas."""
        total: dict[str, float] = dict(self._past)
        busy = [one.server.busy_seconds() for one in self.replicas.values() if one.server is not None]
        kinds: dict[str, float] = {}
        for now in busy:
            kinds.update(now)
        for work in kinds:
            seconds = total.get(work, 0.0)
            for now in busy:
                if work in now:
                    seconds += now[work]
            total[work] = seconds
        return total

    def kill(self, index: int) -> bool:
        """Kill a replica, which is not noticed yet; return whether it was alive."""
        replica = self.replicas.get(index)
        if replica is None or replica.server is None:
            return False
        self._count_held()
        self.deaths += 1
        lost = replica.server.kill()
        self._past.update(replica.server.busy_seconds())
        replica.server = None
        replica.stranded = [job for job in lost if isinstance(job, StageRun)]
        return True

    def notice(self, index: int) -> list[RequestRun]:
        """Notice the death of a replica; return its requests in order of arrival."""
        replica = self.replicas.get(index)
        if replica is None:
            return []  # it drained, and its requests were withdrawn
        self._stop_sending(replica)
        lost, replica.stranded = replica.stranded, []
        for stage_run in lost:
            self._ended(stage_run, replica)
        if replica.load is not None:
            replica.load = self.new_load()
        replica.draining = False  # a draining replica that dies is treated like any other
        return [stage_run.request_run for stage_run in lost]

    def restart(self, index: int) -> None:
        """Restart a dead replica."""
        replica = self.replicas.get(index)
        if replica is not None and replica.server is None:
            self._serve(replica)

    def add(self) -> None:
        """Start one more replica, which takes ``startup_seconds``."""
        self._count_held()
        self.added += 1
        self._starting += 1
        self.sim.after(self.spec.startup_seconds, self._started)

    def _started(self, _: None) -> None:
        self._count_held()
        self._starting -= 1
        replica = self._new()
        self._serve(replica)
        self.events.joined(self.stage)

    def drain(self) -> int | None:
        """Drain the idlest replica, of several the newest, and return its index; it leaves when it is empty.

        Return None if only one is left.
        """
        alive = [one for one in self.live if one.server is not None]
        if len(alive) < 2:
            return None
        chosen = min(reversed(alive), key=lambda one: one.in_flight)
        chosen.draining = True
        self._stop_sending(chosen)
        return chosen.index

    def drained(self, index: int) -> None:
        """Complete `drain` after all others have been told."""
        self._leave_if_empty(self.replicas[index])

    def _leave_if_empty(self, replica: Replica) -> None:
        if replica.in_flight or replica.index not in self.replicas:
            return
        self._count_held()
        self.gone += 1
        del self.replicas[replica.index]
        if replica.server is not None:
            self._past.update(replica.server.busy_seconds())

    def _new(self) -> Replica:
        self._count_held()
        replica = Replica(self._next_index, None, self.new_load())
        self._next_index += 1
        self.replicas[replica.index] = replica
        return replica

    def _serve(self, replica: Replica) -> None:
        self._count_held()
        replica.server = self._make(replica.index, self._done)
        self._send_again(replica)

    def _send_again(self, replica: Replica) -> None:
        at = bisect_left(self.live, replica.index, key=index_of)
        if at == len(self.live) or self.live[at] is not replica:
            self.live.insert(at, replica)

    def _stop_sending(self, replica: Replica) -> None:
        if replica in self.live:
            self.live.remove(replica)

    def _count_held(self) -> None:
        now = self.sim.now
        passed = now - self._held_since
        if not passed:
            return
        serving = self.serving
        self._held_seconds += self.held * passed
        self.serving_seconds += serving * passed
        self.empty_seconds += 0.0 if serving else passed
        self._held_since = now


class Chooser(Protocol):
    """Picks one of the replicas of a stage."""

    def choose(self, cost_seconds: float, live: Sequence[Replica], now: float) -> Replica:
        """Return one of ``live``, which is sorted by index and not empty."""


class RoundRobinChooser:
    """Picks each replica in turn, by index, in O(log n): like `RoundRobin`, without a state for each replica."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, cost_seconds: float, live: Sequence[Replica], now: float) -> Replica:
        last = self._last
        at = last + 1  # its position while no replica has come or gone
        if at >= len(live) or live[at].index != at:
            at = bisect_right(live, last, key=index_of)
            if at == len(live):
                at = 0
        chosen = live[at]
        self._last = chosen.index
        return chosen


class BalancerChooser:
    """Picks the replica that a balancer picks, describing only those that it compares."""

    def __init__(self, balancer: Balancer, rng: Random) -> None:
        self.balancer = balancer
        self._rng = rng

    def choose(self, cost_seconds: float, live: Sequence[Replica], now: float) -> Replica:
        def state(at: int) -> ReplicaState:
            one = live[at]
            seconds = one.pending_seconds if one.load is None else one.load.remaining_seconds(now)
            return ReplicaState(one.index, seconds if seconds > 0.0 else 0.0, one.in_flight)

        picked = self.balancer.pick(cost_seconds, LazyReplicas(len(live), state), self._rng).replica_id
        assert picked is not None  # there is at least one, and all count as healthy
        if picked < len(live) and live[picked].index == picked:  # its position while no replica has come or gone
            return live[picked]
        return live[bisect_left(live, picked, key=index_of)]


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

"""Run requests through all stages, from arrivals to records, and let replicas die by schedule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.graph.flow import FlowPlan, StagePhase
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Outcome, Record
from vllm_omni_sched.sim.pools.gated import GatedPool, Orchestration, plan_of
from vllm_omni_sched.sim.pools.pool import Pool
from vllm_omni_sched.sim.pools.requests import RequestRun, StageRun
from vllm_omni_sched.sim.scenario.scenario import Failures as FailureOptions
from vllm_omni_sched.sim.scenario.stages import Link
from vllm_omni_sched.sim.work import Request


class Failures:
    """Kills replicas by the schedule: one of the live ones, with equal probability, and its rack.

    Args:
        options: times of deaths, by a Poisson process or as given, the size of a rack, and the times until a death is
            noticed and a replica is restarted.
        noticed: called for each dead replica when its death is noticed.
        goes_on: returns whether the simulation still has requests.
    """

    def __init__(
        self,
        sim: Simulator,
        pool: Pool,
        options: FailureOptions,
        rng: Random,
        noticed: Callable[[Pool, int, float], None],
        goes_on: Callable[[], bool],
    ) -> None:
        self._sim, self._pool, self._options, self._rng = sim, pool, options, rng
        self._rack = options.rack_replicas if options.kind == "rack" else 1
        self._noticed, self._goes_on = noticed, goes_on
        self.deaths = 0
        for when in options.at_seconds:
            sim.at(when, self._strike)
        self._next()

    def _next(self) -> None:
        if self._options.every_seconds is not None:
            self._sim.after(self._rng.expovariate(1 / self._options.every_seconds), self._strike_again)

    def _strike_again(self, _: None) -> None:
        if self._goes_on():
            self._strike(None)
            self._next()

    def _strike(self, _: None) -> None:
        alive = [one.index for one in self._pool.replicas.values() if one.server is not None]
        if not alive or not self._goes_on():
            return
        rack = self._rng.choice(alive) // self._rack
        for index in alive:
            if index // self._rack == rack and self._pool.kill(index):
                self.deaths += 1
                self._sim.after(self._options.detection_seconds, self._notice, index)

    def _notice(self, index: int) -> None:
        self._noticed(self._pool, index, self._options.restart_seconds)


INF = float("inf")


class Links:
    """The links of one edge: each replica of the source has its own, which sends first come first served.

    Each message takes ``bytes / bandwidth``, and arrives a latency later.
    """

    def __init__(self, sim: Simulator, link: Link) -> None:
        self._sim, self._link = sim, link
        self._free_at: dict[int, float] = {}  # by replica

    def send(self, run: RequestRun, source: int, arrived: Callable[[tuple[RequestRun, int]], None], stage: int) -> None:
        """Send what a replica has made for a request to a stage; then ``arrived((run, stage))`` happens."""
        nbytes = int(self._link.bytes_per_embed * sum(item.embeds for item in run.request.items))
        begins = max(self._free_at.get(source, 0.0), self._sim.now)
        self._free_at[source] = ends = begins + nbytes / (self._link.bytes_per_second or INF)
        self._sim.at(ends + self._link.latency_seconds, arrived, (run, stage))


class Pipeline:
    """Requests arrive, go through their stages, and leave, each once and with one record.

    1. Arrivals are read one at a time: the iterator may be endless, and is not read ahead.
    2. The modality of a request determines its stages.
    3. The client gets the first output of ``answers``, or of the last stage; if that stage reports no times, at
       the end of the request. For a request that ran again, the last run counts.
    4. A request leaves when all its outputs are there. If a stage fails for it, all of it fails, or only the outputs
       that need the stage (`branch_errors`); it then counts as failed when the others are there.
    5. A replica whose death is noticed is repaired by recovery in the core, if that is on; else its requests fail,
       and it is restarted only with ``respawn``.

    Args:
        requests: in order of arrival.
        record: gets that of each request when it leaves.
        paths: stages by modality, in order, or the plan; ``""``: for those that are not named.
        orchestration: the pipeline core, if the pools are `GatedPool`.
        links: by stages, from and to; a step that has none takes no time.
        answers: the stage whose output is the client's.
        left: told of each work that a stage has done, for traces.
        closed: a closed loop: so many requests come by their arrival times, and from then on one when one leaves.
        until: when a closed loop ends.
    """

    def __init__(
        self,
        sim: Simulator,
        pools: Sequence[Pool],
        requests: Iterable[Request],
        record: Callable[[Record], None],
        paths: Mapping[str, tuple[int, ...] | FlowPlan],
        orchestration: Orchestration | None = None,
        links: Mapping[tuple[int, int], Links] | None = None,
        answers: int | None = None,
        respawn: bool = False,
        left: Callable[[StageRun], None] | None = None,
        closed: int | None = None,
        until: float = INF,
    ) -> None:
        self.sim, self.pools, self.orchestration = sim, tuple(pools), orchestration
        self.runs: dict[int, RequestRun] = {}  # present requests, by number
        self.arrived = self.done = self.failed = 0
        self.arriving = True
        # called with each request that arrives (True) or leaves (False)
        self.watchers: list[Callable[[RequestRun, bool], None]] = []
        self._plans = {modality: plan_of(path) for modality, path in paths.items()}
        self._other = self._plans[""]
        self._record, self._left, self._links = record, left, links or {}
        self._answers, self._respawn = answers, respawn
        self._restart_seconds: dict[tuple[int, int], float] = {}
        if orchestration is not None:
            orchestration.pipeline = self
        self._recovering = orchestration if orchestration is not None and orchestration.recovers else None
        self._credits = None if orchestration is None else orchestration.context.credits
        for pool in pools:
            pool.events = self
        self._requests: Iterator[Request] = iter(requests)
        self._to_open, self._closed, self._until = closed or 0, closed is not None, until
        self._ask()

    @property
    def in_flight(self) -> int:
        """Return the number of requests that have arrived and not left."""
        return len(self.runs)

    def active(self) -> bool:
        """Return whether requests are present or still to come."""
        return self.arriving or bool(self.runs)

    def fail_by(self, stage: int, options: FailureOptions, rng: Random) -> Failures:
        """Let replicas of a stage die by a schedule."""
        return Failures(self.sim, self.pools[stage], options, rng, self.notice, self.active)

    # ---- requests

    def _ask(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self.arriving = False
        else:
            self.sim.at(request.arrival, self._arrive, request)

    def _come_next(self) -> None:
        """Let the next request of a closed loop arrive, since one has left."""
        request = next(self._requests, None) if self.sim.now < self._until else None
        if request is None:
            self.arriving = False
        else:
            self.sim.soon(0.0, self._arrive, replace(request, arrival=self.sim.now))

    def _arrive(self, request: Request) -> None:
        if not self._closed:
            self._ask()
        elif self._to_open:
            self._to_open -= 1
            if self._to_open:
                self._ask()
        run = RequestRun(request, self._plans.get(request.modality, self._other))
        self.runs[request.number] = run
        self.arrived += 1
        starts = run.flow.begin() if self.orchestration is None else self.orchestration.arrived(run)
        for watcher in self.watchers:
            watcher(run, True)
        for stage in starts:
            self._submit(run, stage)

    def finished(self, run: RequestRun, stage_run: StageRun, starts: tuple[int, ...]) -> None:
        """Send a request, with which a stage is done, on to the stages ``starts``.

        ``stage_run``: the work whose output it gets, which is its own or identical to it.
        """
        final = run.flow.is_over
        if self._left is not None:
            self._left(stage_run)
        if stage_run.stage == self._answers or (final and run.answer[0] == INF):
            run.answer = stage_run.first, stage_run.largest_gap
        if self._credits is not None:
            self._release_before(run, stage_run.stage)
        if final:
            self._leave(run, Outcome.FAILED if run.flow.dropped else Outcome.DONE)
            return
        if self._links:
            for stage in run.flow.plan.successors[stage_run.stage]:  # a join may wait for other inputs meanwhile
                links = self._links.get((stage_run.stage, stage))
                if links is not None and (stage in starts or run.flow.phase(stage) is StagePhase.WAITS):
                    run.in_transit[stage] = run.in_transit.get(stage, 0) + 1
                    links.send(run, stage_run.replica, self._carried, stage)
        for stage in starts:
            self._submit(run, stage)

    def _carried(self, what: tuple[RequestRun, int]) -> None:
        run, stage = what
        run.in_transit[stage] -= 1
        self._submit(run, stage)

    def _submit(self, run: RequestRun, stage: int) -> None:
        """Submit a request to a stage that it has started, once all inputs are there, unless it failed meanwhile."""
        if not (run.gone or run.in_transit.get(stage)) and run.flow.phase(stage) is StagePhase.STARTED:
            self.pools[stage].submit(run)

    def _release_before(self, run: RequestRun, stage: int) -> None:
        """Release requests of earlier stages that may wait for the room of this one."""
        for earlier in run.path:
            if earlier == stage:
                break
            self._release(self.pools[earlier])

    @staticmethod
    def _release(pool: Pool) -> None:
        if isinstance(pool, GatedPool):
            pool.release()

    def _leave(self, run: RequestRun, outcome: Outcome) -> None:
        request, now = run.request, self.sim.now
        del self.runs[request.number]
        run.gone = True
        if self.orchestration is not None:
            self.orchestration.left(run)
        for watcher in self.watchers:
            watcher(run, False)
        first, gap = run.answer
        if outcome is Outcome.DONE:
            self.done += 1
            # the output of shared work may have been there before the request
            first = max(first, request.arrival) if first < INF else now
        else:
            self.failed += 1
            first = INF
        self._record(
            Record(
                request.number,
                request.arrival,
                request.modality,
                request.sla,
                first,
                now,
                request.output_tokens,
                gap,
                outcome,
                run.repeats + 1,
            )
        )
        if self._closed:
            self._come_next()

    def fail_request(self, run: RequestRun) -> None:
        """Let a request leave without a result."""
        if run.gone:
            return
        run.gone = True
        for stage in run.path:  # where it runs, and where others follow it
            self.pools[stage].withdraw(run)
        self._leave(run, Outcome.FAILED)
        if self.orchestration is not None:
            for pool in self.pools:
                self._release(pool)

    def fail_stage(self, run: RequestRun, stage: int) -> None:
        """Let a stage fail for a request: all of it fails, or only the outputs that need the stage."""
        if run.gone:
            return
        if self.orchestration is None:
            self.fail_request(run)
            return
        for action in self.orchestration.tell(e.StageFailed(stage, run.name)):
            if isinstance(action, e.Fails) and action.over:
                self.fail_request(run)
            elif isinstance(action, e.Fails):
                for one in action.stages:
                    self.pools[one].withdraw(run)

    def abort(self, number: int) -> bool:
        """Abort a request for its client, counting it as failed; return whether it was present."""
        run = self.runs.get(number)
        if run is None:
            return False
        self.fail_request(run)
        return True

    # ---- replicas

    def notice(self, pool: Pool, index: int, restart_seconds: float) -> None:
        """Notice that a replica is dead, which takes so long to restart."""
        self._restart_seconds[pool.stage, index] = restart_seconds
        lost = pool.notice(index)
        if self._recovering is not None:
            self.sim.after(0.0, self._died, (pool, index))  # when all that died with it are suspected, too
            return
        for run in lost:
            self.fail_request(run)
        if self._respawn:
            self.restart_replica(pool.stage, index)
        self._give_up_waiting(pool)

    def _died(self, dead: tuple[Pool, int]) -> None:
        pool, index = dead
        assert self._recovering is not None
        self._recovering.tell(e.DeathExamined(pool.stage, index, "killed"))

    def _give_up_waiting(self, pool: Pool) -> None:
        """Fail the queued requests of a stage that has no replica and will have none."""
        if isinstance(pool, GatedPool) and not self.expects_replica(pool.stage):
            while (run := pool.next_waiting()) is not None:  # when one fails, its follower may begin to wait
                self.fail_stage(run, pool.stage)

    def expects_replica(self, stage: int) -> bool:
        """Return whether a replica of a stage exists or will."""
        pool = self.pools[stage]
        if pool.live or pool.starting:
            return True
        if self._recovering is None:
            return self._respawn
        recovery = self._recovering.core.recovery
        return recovery is not None and recovery.expects_replica(stage)

    def restart_replica(self, stage: int, index: int) -> None:
        """Restart a replica after its restart time."""
        self.sim.after(self._restart_seconds.get((stage, index), 0.0), self._started, (stage, index))

    def _started(self, which: tuple[int, int]) -> None:
        stage, index = which
        self.pools[stage].restart(index)
        self._release(self.pools[stage])

    def give_up(self, stage: int, request_ids: Sequence[str]) -> None:
        """Fail requests in a stage where recovery gives them up."""
        for name in request_ids:
            run = self.runs.get(int(name))
            if run is not None:
                self.fail_stage(run, stage)

    def joined(self, stage: int) -> None:
        """Release requests for a new replica that can take some."""
        self._release(self.pools[stage])

    def drain(self, pool: Pool) -> bool:
        """Drain one replica, and return whether there was one to spare."""
        index = pool.drain()
        if index is None:
            return False
        pool.drained(index)
        return True

    def scale(self, pool: Pool, replicas: int) -> None:
        """Scale to so many replicas: start new ones, or drain the idlest."""
        while pool.target < replicas:
            pool.add()
        while pool.target > replicas and self.drain(pool):
            pass

"""Simulate stages that the pipeline core schedules, as it does in vLLM-Omni."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from random import Random  # noqa: TID251 (the type of an argument)
from typing import TYPE_CHECKING

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.context import PipelineContext
from vllm_omni_sched.core.pipeline.core import PipelineCore
from vllm_omni_sched.core.pipeline.requests import PipelineRequest, StageWork
from vllm_omni_sched.graph.flow import FlowPlan
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.pool import Chooser, Make, Pool, Replica, RoundRobinChooser, StageSpec
from vllm_omni_sched.sim.pools.requests import RequestRun, SimulatedWork, StageRun, features_of, keys_of, work_of
from vllm_omni_sched.sim.work import Job

if TYPE_CHECKING:
    from vllm_omni_sched.sim.pools.pipeline import Pipeline


def plan_of(path: tuple[int, ...] | FlowPlan) -> FlowPlan:
    """Return the plan of a request that goes from stage to stage along a path; a plan is returned as it is."""
    return path if isinstance(path, FlowPlan) else FlowPlan.along(path)


def graph_of(specs: Sequence[StageSpec], paths: Sequence[tuple[int, ...] | FlowPlan]) -> StageGraph:
    """Return the stages as a graph with an edge for each step of a path or plan.

    Raises:
        GraphError: no path goes through a stage.
    """
    sources: dict[int, dict[int, None]] = {stage: {} for stage in range(len(specs))}
    plans = list(map(plan_of, paths))
    for plan in plans:
        for after in plan.stages:
            sources[after].update(dict.fromkeys(plan.sources[after]))
    finals = {output for plan in plans for output in plan.outputs}
    stages = [
        Stage(number, spec.name, spec.kind, tuple(sources[number]), number in finals, replicas=spec.replicas)
        for number, spec in enumerate(specs)
    ]
    return StageGraph.of(stages, {one for plan in plans for one in plan.stages if not plan.sources[one]})


class Orchestration:
    """Runs the pipeline core by the clock of a simulation; pools add their stages to it, and get its actions.

    Args:
        config: the options.
        specs: the stages, by number.
        paths: all paths of requests through the stages, or their plans.
        rng: random source.
    """

    def __init__(
        self,
        sim: Simulator,
        config: StageSchedConfig,
        specs: Sequence[StageSpec],
        paths: Sequence[tuple[int, ...] | FlowPlan],
        rng: Random,
    ) -> None:
        self.config, self.rng, self._sim = config, rng, sim
        self.context = PipelineContext(config, graph_of(specs, paths), rng)
        self.core = PipelineCore(self.context, keeps_outputs=True)
        self.pools: dict[int, GatedPool] = {}
        self.pipeline: Pipeline

    @property
    def recovers(self) -> bool:
        """Return whether recovery is on."""
        return self.core.recovery is not None

    def handle(self, event: e.Event) -> list[e.Action]:
        """Pass an event to the core, and return its actions."""
        return self.core.handle(event, self._sim.now)

    def tell(self, event: e.Event) -> list[e.Action]:
        """Pass an event to the core, carry out its actions, and return them."""
        actions = self.handle(event)
        self.do(actions)
        return actions

    def do(self, actions: Iterable[e.Action]) -> None:
        """Carry out actions of the core."""
        for action in actions:
            match action:
                case e.Start(work) | e.Stop(work) | e.Gone(work):
                    self.pools[work.stage_id].do(action)
                case e.Continued(stage_id):
                    self.pools[stage_id].do(action)
                case e.Wake(stage_id, at):
                    self._sim.at(at, self._woken, (stage_id, at))
                case e.GivenUp(work, request_ids):
                    self.pipeline.give_up(work.stage_id, request_ids)
                case e.Restart(stage_id, index):
                    self.pipeline.restart_replica(stage_id, index)
                case _:
                    pass

    def _woken(self, of: tuple[int | None, float]) -> None:
        self.tell(e.Woken(*of))

    def arrived(self, run: RequestRun) -> tuple[int, ...]:
        """Describe a request that has arrived to the core, and return the stages in which it begins."""
        request, classes = run.request, self.context.classes
        sla = classes.named(request.sla, request.modality)
        run.known = PipelineRequest(
            run.name,
            request.arrival,
            sla,
            classes.is_low(sla),
            request.priority,
            request.modality,
            keys_of(request),
            run.path,
            run.features,
            run.costs,
            flow=run.flow,
        )
        for stage in run.path:
            run.features[stage] = features_of(request, self.context.graph.stage(stage).kind)
        actions = self.handle(e.Arrived(run.known))
        return next(one.starts for one in actions if isinstance(one, e.Proceeds))

    def left(self, run: RequestRun) -> None:
        """Tell the core that a request has left."""
        self.tell(e.Left(run.name))


class GatedPool(Pool):
    """Turns what happens in a stage into events of the pipeline core, and the core's actions into jobs of servers.

    The core's rules are those of `StageScheduler`.

    Args:
        shared: the core, which all stages share.
        chooser: sends each request to a replica at once, past the core's queue; None: the core decides.
    """

    def __init__(
        self,
        sim: Simulator,
        stage: int,
        spec: StageSpec,
        make: Make,
        shared: Orchestration,
        chooser: Chooser | None = None,
    ) -> None:
        self.shared = shared
        self._direct = chooser
        shared.pools[stage] = self
        self.scheduler = shared.core.add_stage(stage, spec.at_once, ())
        self._autoregressive = spec.kind is StageKind.AR
        self._runs: dict[str, RequestRun] = {}  # present in this stage
        super().__init__(sim, stage, spec, make, chooser or RoundRobinChooser())

    # ---- requests

    def submit(self, run: RequestRun) -> None:
        if not self.live and (self._direct is not None or not self.events.expects_replica(self.stage)):
            self.events.fail_stage(run, self.stage)
            return
        self._runs[run.name] = run
        run.works[self.stage] = work = SimulatedWork(
            request_id=run.name,
            stage_id=self.stage,
            known=run.known,
            arrived=self.sim.now,
            key=self._key(run),
            request_run=run,
        )
        if any(isinstance(one, e.Lead) for one in self.shared.handle(e.Submitted(work, run.features[self.stage]))):
            if self._direct is None:
                self.shared.tell(e.Waits(work))
            else:
                chosen = self._direct.choose(self.estimate(run), self.live, self.sim.now)
                self.shared.tell(e.Placed(work, chosen.index))

    def estimate(self, run: RequestRun) -> float:
        return self.shared.context.costs.estimate(str(self.stage), run.features[self.stage])

    def _key(self, run: RequestRun) -> Hashable | None:
        merges = self._direct is None and self.shared.config.graph.merging.enabled
        return work_of(run.request, self.spec.kind) if merges else None

    def release(self) -> None:
        """Start all requests that may start now."""
        self.shared.tell(e.Tick(self.stage))

    def do(self, action: e.Action) -> None:
        """Carry out an action of the core."""
        match action:
            case e.Start(SimulatedWork() as work):
                self._start(work)
            case e.Continued(_, name, SimulatedWork() as heir):
                self._inherit(self.scheduler.running[name], heir)
            case e.Stop(SimulatedWork() as work):
                self._stop(work)
                self.shared.tell(e.Dropped(self.stage, work.request_id))
            case e.Gone(SimulatedWork() as work):
                self._stop(work)
            case _:
                pass

    def _start(self, work: SimulatedWork) -> None:
        work.sent = True
        replica = self.replicas[work.replica_id]
        work.stage_run = stage_run = StageRun(work.request_run, self.stage, work.cost_seconds)
        stage_run.work = work
        self.send(stage_run, replica)

    def on_first_output(self, job: Job) -> None:
        if isinstance(job, StageRun) and job.request_run.stage_runs.get(self.stage) is job and not job.has_output:
            job.has_output = True
            assert job.work is not None
            self.shared.handle(e.FirstOutput(self.stage, job.work.request_id))
            self.release()  # waiting requests may have room now

    def finish(self, run: RequestRun, stage_run: StageRun, replica: Replica) -> None:
        assert stage_run.work is not None
        name, now = stage_run.work.request_id, self.sim.now
        if self._autoregressive and not stage_run.has_output:
            # the server does not report first outputs when they are made
            first = max(min(stage_run.first, now) - stage_run.submitted, 0.0)
            self.shared.handle(e.FirstOutput(self.stage, name, first))
        for action in self.shared.tell(e.Finished(self.stage, name)):
            if isinstance(action, e.Proceeds):
                self.events.finished(self._runs.pop(action.request_id), stage_run, action.starts)
        self.release()

    # ---- those that leave, and deaths

    def withdraw(self, run: RequestRun) -> None:
        if self._runs.pop(run.name, None) is not None:
            self.shared.tell(e.Detached(self.stage, run.name))
            self.shared.tell(e.Dropped(self.stage, run.name))
        self.release()

    def _inherit(self, work: StageWork, heir: SimulatedWork) -> None:
        """Let running work go on for another request."""
        assert isinstance(work, SimulatedWork)
        stage_run = work.stage_run
        assert stage_run is not None
        work.request_run.stage_runs.pop(self.stage, None)
        work.request_run = stage_run.request_run = heir.request_run
        heir.request_run.works[self.stage], heir.request_run.stage_runs[self.stage] = work, stage_run

    def _stop(self, work: SimulatedWork) -> None:
        if work.stage_run is not None and work.request_run.stage_runs.get(self.stage) is work.stage_run:
            self.stop(work.stage_run)

    def notice(self, index: int) -> list[RequestRun]:
        lost = super().notice(index)
        self.shared.tell(e.ReplicaDied(self.stage, index, "killed"))
        return lost

    def _serve(self, replica: Replica) -> None:
        super()._serve(replica)
        self.shared.tell(e.ReplicaUp(self.stage, replica.index))

    def add(self) -> None:
        super().add()
        self.shared.handle(e.ReplicaStarting(self.stage))

    def _started(self, nothing: None) -> None:
        self.shared.handle(e.ReplicaStarting(self.stage, on=False))
        super()._started(nothing)

    def drain(self) -> int | None:
        chosen = super().drain()
        if chosen is not None:
            self.shared.tell(e.ReplicaDraining(self.stage, chosen))
        return chosen

    def _leave_if_empty(self, replica: Replica) -> None:
        super()._leave_if_empty(replica)
        if replica.index not in self.replicas:
            self.shared.tell(e.ReplicaGone(self.stage, replica.index))

    @property
    def request_seconds(self) -> float | None:
        return self.scheduler.request_seconds

    @property
    def present(self) -> int:
        return super().present + len(self.scheduler.waiting)

    def next_waiting(self) -> RequestRun | None:
        """Return a request that waits; None if none does."""
        name = next(iter(self.scheduler.waiting), None)
        return None if name is None else self._runs[name]

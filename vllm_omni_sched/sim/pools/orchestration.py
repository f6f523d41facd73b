"""Connect a simulated pipeline to the core that also schedules the stages of vLLM-Omni."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random  # noqa: TID251 (the type of an argument)
from typing import TYPE_CHECKING

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.context import PipelineContext
from vllm_omni_sched.core.pipeline.core import PipelineCore
from vllm_omni_sched.core.pipeline.requests import PipelineRequest
from vllm_omni_sched.graph.flow import FlowPlan
from vllm_omni_sched.graph.stages import Stage, StageGraph
from vllm_omni_sched.monitor.anomaly.finding import Anomaly
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.replicas import StageSpec
from vllm_omni_sched.sim.pools.request_run import RequestRun, features_of, keys_of

if TYPE_CHECKING:
    from vllm_omni_sched.sim.pools.gated import GatedPool
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
        monitored: whether the core looks for anomalies.
    """

    def __init__(
        self,
        sim: Simulator,
        config: StageSchedConfig,
        specs: Sequence[StageSpec],
        paths: Sequence[tuple[int, ...] | FlowPlan],
        rng: Random,
        monitored: bool = False,
    ) -> None:
        self.config, self.rng, self._sim = config, rng, sim
        self.context = PipelineContext(config, graph_of(specs, paths), rng)
        self.core = PipelineCore(self.context, keeps_outputs=True, checked=monitored)
        self.monitored = monitored
        self.anomalies: list[tuple[float, Anomaly]] = []  # with the time when each was found
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
                case e.AnomalyBegins(_, anomaly):
                    self.anomalies.append((self._sim.now, anomaly))
                case e.Restart(stage_id, index):
                    self.pipeline.restart_replica(stage_id, index)
                case _:
                    pass

    def check_while(self, active: Callable[[], bool]) -> None:
        """Let the core look for anomalies now and then, while requests are present."""

        def check(_: None) -> None:
            if active():
                self.tell(e.Check())
                self._sim.after(interval, check)

        interval = self.config.monitoring.anomaly.interval_seconds
        self._sim.after(interval, check)

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

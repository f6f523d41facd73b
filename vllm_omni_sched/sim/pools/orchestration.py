"""Connect a simulated pipeline to the core that also schedules the stages of vLLM-Omni."""

import math
from collections.abc import Sequence
from itertools import pairwise
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.core.pipeline.context import PipelineContext
from vllm_omni_sched.core.pipeline.core import PipelineCore
from vllm_omni_sched.core.pipeline.events import Action, Arrived, Event, Left
from vllm_omni_sched.core.pipeline.requests import PipelineRequest
from vllm_omni_sched.graph.stages import Stage, StageGraph
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.monitor.recovery.options import recovery_options
from vllm_omni_sched.monitor.recovery.policy import Recovery
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.features import bytes_of, features_of, keys_of
from vllm_omni_sched.sim.pools.request_run import RequestRun
from vllm_omni_sched.sim.pools.spec import StageSpec


def graph_of(specs: Sequence[StageSpec], paths: Sequence[tuple[int, ...]]) -> StageGraph:
    """Return the stages as a graph with an edge for each step of a path.

    Raises:
        GraphError: no path goes through a stage.
    """
    sources: dict[int, dict[int, None]] = {stage: {} for stage in range(len(specs))}
    for path in paths:
        for before, after in pairwise(path):
            sources[after][before] = None
    finals = {path[-1] for path in paths}
    stages = [
        Stage(number, spec.name, spec.kind, tuple(sources[number]), number in finals, replicas=spec.replicas)
        for number, spec in enumerate(specs)
    ]
    return StageGraph.of(stages, {path[0] for path in paths})


class Orchestration:
    """Runs the pipeline core by the clock of a simulation; pools add their stages to it.

    Args:
        config: the options.
        specs: the stages, by number.
        paths: all paths of requests through the stages.
        rng: random source.
    """

    def __init__(
        self,
        sim: Simulator,
        config: StageSchedConfig,
        specs: Sequence[StageSpec],
        paths: Sequence[tuple[int, ...]],
        rng: Random,
    ) -> None:
        self.config, self.rng, self._sim = config, rng, sim
        self.context = PipelineContext(config, graph_of(specs, paths), rng)
        self.core = PipelineCore(self.context)

    def handle(self, event: Event) -> list[Action]:
        """Pass an event to the core, and return its actions."""
        return self.core.handle(event, self._sim.now)

    def recovery(self, specs: Sequence[StageSpec]) -> Recovery | None:
        """Return the policy that repairs dead replicas; None if it is off.

        The output of a stage for a request is kept until the request leaves, so no earlier stage runs again.
        """
        options = self.config.runtime.recovery
        if not options.enabled:
            return None
        return Recovery(
            {Replica(stage, index): math.inf for stage, spec in enumerate(specs) for index in range(spec.replicas)},
            {},
            recovery_options(options),
            self.rng,
        )

    def arrived(self, run: RequestRun) -> None:
        """Describe a request that has arrived to the core."""
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
            bytes_of(request),
            run.path,
            run.features,
            run.costs,
        )
        for stage in run.path:
            run.features[stage] = features_of(request, self.context.graph.stage(stage).kind)
        self.handle(Arrived(run.known))

    def left(self, run: RequestRun) -> None:
        """Tell the core that a request has left."""
        self.handle(Left(run.name))

"""Build the stages of a scenario as pools of replicas, with the pipeline that moves requests through them."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.graph.flow import FlowPlan
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.monitor.forecast.load import ForecastOptions
from vllm_omni_sched.monitor.forecast.plan import PlanOptions
from vllm_omni_sched.resource.pipeline.balance import CostBalancer, LeastQueue
from vllm_omni_sched.resource.pipeline.stage_cost import StageCosts
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.costs.hardware import decoder_of
from vllm_omni_sched.sim.costs.measured import MeasuredCosts, UnsteadyCosts
from vllm_omni_sched.sim.costs.models import model
from vllm_omni_sched.sim.costs.roofline import Efficiency, engine_costs
from vllm_omni_sched.sim.engine.hosted import HostedEngine
from vllm_omni_sched.sim.engine.limits import EngineLimits, make_core
from vllm_omni_sched.sim.engine.server import EngineServer, Watcher
from vllm_omni_sched.sim.kernel import Host, Simulator
from vllm_omni_sched.sim.measure import Histogram, Record
from vllm_omni_sched.sim.output import Spans
from vllm_omni_sched.sim.pools.autoscale import ForecastScaler, ReactiveScaler
from vllm_omni_sched.sim.pools.gated import GatedPool, Orchestration
from vllm_omni_sched.sim.pools.pipeline import Links, Pipeline
from vllm_omni_sched.sim.pools.pool import BalancerChooser, Chooser, Make, Pool, RoundRobinChooser, StageSpec
from vllm_omni_sched.sim.pools.requests import StageRun
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.scenario.stages import EncoderStage, EngineStage, ServersStage, Stage, VideoStage
from vllm_omni_sched.sim.servers import EncoderServer, QueueServer
from vllm_omni_sched.sim.video import VideoServer, stock_decoding
from vllm_omni_sched.sim.work import Done, Job, Request, Server
from vllm_omni_sched.sim.workloads import base, registry


def engine_limits(stage: EngineStage, encodes: bool, kv_tokens: int) -> EngineLimits:
    """Return the limits of an engine; vLLM's defaults where the scenario sets none.

    Encoder cache and budget hold the model's largest item, as in vLLM's ``compute_mm_encoder_budget``.
    """
    tokens = stage.max_num_batched_tokens
    embeds = max(tokens, largest_item(stage, stage.kv_tokens or kv_tokens))
    reserve, each = stage.encoder_reserve_embeds, 0.0
    if stage.encode_bytes_per_embed is not None and stage.model is not None:
        each = model(stage.model).llm.kv_bytes_per_token(stage.devices) / stage.encode_bytes_per_embed
        kv_tokens -= math.ceil((embeds if reserve is None else reserve) / each)
    return EngineLimits(
        stage.kv_tokens or kv_tokens,
        stage.max_num_seqs,
        tokens,
        embeds,
        embeds,
        encodes,
        lane_items=stage.lane_items,
        paced=stage.lane_on != "device",
        lane_beside=stage.lane_on == "beside",
        reserve_embeds=reserve,
        embeds_per_token=each,
    )


def largest_item(stage: EngineStage, kv_tokens: int) -> int:
    """Return the embeddings of the model's largest item; 0 if only a calibration is known.

    vLLM does not start if the KV cache cannot hold one request of ``max_model_len``: operators have to lower it.
    """
    if stage.largest_item_embeds is not None:
        return stage.largest_item_embeds
    if stage.model is None:
        return 0
    shape = model(stage.model)
    return shape.largest_item(stage.max_model_len or min(shape.max_model_len, kv_tokens))


class Engines:
    """Replicas of an engine, each with its own core.

    ``made``: all replicas made for ``stage``, including dead ones. ``on_first_output``: called with each job that has
    its first token.
    """

    def __init__(
        self,
        sim: Simulator,
        scenario: Scenario,
        stage: EngineStage,
        costs: EngineCosts,
        itl: Histogram,
        watch: Callable[[int], Watcher] | None,
        host: Host | None = None,
    ) -> None:
        self._host = host
        self.stage = stage
        self._sim, self._scenario, self._costs, self._itl, self._watch = sim, scenario, costs, itl, watch
        self._limits = engine_limits(stage, scenario.encoder_of(stage) != "elsewhere", costs.kv_tokens)
        self._config = scenario.policy.model_copy(update={"encode_ahead": scenario.encoder_of(stage) == "lane"})
        self.made: list[EngineServer] = []
        self.on_first_output: Done | None = None

    def __call__(self, index: int, done: Done) -> Server:
        core = make_core(self._config, self._limits)
        watcher = self._watch(index) if self._watch is not None else None
        engine: EngineServer
        if isinstance(self._costs, MeasuredCosts) and (self._host is not None or self._costs.has_output_costs):
            host = Host(self._sim, 1) if self._host is None else self._host  # a front end of its own
            engine = HostedEngine(
                self._sim, self._costs, self._limits, core, done, self._itl, host, watcher, self._on_first_output
            )
        else:
            engine = EngineServer(
                self._sim, self._costs, self._limits, core, done, self._itl, watcher, self._on_first_output
            )
        self.made.append(engine)
        return engine

    def _on_first_output(self, job: Job) -> None:
        if self.on_first_output is not None:
            self.on_first_output(job)


_MODALITIES = ("text", "image", "audio", "video")


class Cluster:
    """Builds and holds all parts of one simulation.

    ``sources``: source of the costs by stage, and of the workload.

    Raises:
        ConfigError: a model does not fit on its devices, or a file cannot be read; the message names the stage.
    """

    def __init__(
        self, scenario: Scenario, sim: Simulator, record: Callable[[Record], None], spans: Spans | None
    ) -> None:
        self._scenario, self.sim, self._spans = scenario, sim, spans
        self.itl = Histogram()
        cores = scenario.cluster.host_cores
        self.host = None if cores is None else Host(sim, cores)
        self.engines: list[Engines] = []
        self.sources: dict[str, str] = {}
        workload = registry.build({"kind": scenario.workload.kind, **scenario.workload.table()}, folder=Path())
        self.sources["workload"] = workload.source
        makes = [self._make(stage) for stage in scenario.stages]
        specs = [_spec(scenario, stage) for stage in scenario.stages]
        paths = _paths(scenario.stages)
        orchestration = None
        if scenario.orchestration is not None:
            ways = [path for at, path in enumerate(paths.values()) if path not in list(paths.values())[:at]]
            rng = self._rng("orchestration")
            orchestration = Orchestration(sim, scenario.orchestration, specs, ways, rng)
        learns = orchestration is None and any(
            stage.balance == "cost" or _scaled(scenario, stage) for stage in scenario.stages
        )
        costs = StageCosts() if learns else None
        pools: list[Pool] = []
        for at, (stage, spec, make) in enumerate(zip(scenario.stages, specs, makes, strict=True)):
            if orchestration is not None:
                chooser = None if stage.balance is None else self._chooser(stage)
                pools.append(pool := GatedPool(sim, at, spec, make, orchestration, chooser))
                if isinstance(make, Engines):
                    make.on_first_output = pool.on_first_output
            else:
                needs = stage.balance == "cost" or _scaled(scenario, stage)
                pools.append(Pool(sim, at, spec, make, self._chooser(stage), costs if needs else None))
        self.pipeline = Pipeline(
            sim,
            pools,
            self._requests(workload),
            record,
            paths,
            orchestration,
            links=self._links(),
            answers=scenario.output_stage,
            respawn=scenario.respawn,
            left=self._left if spans is not None else None,
            closed=scenario.workload.concurrency,
            until=scenario.duration_seconds,
        )
        for number, failures in enumerate(scenario.failures):
            self.pipeline.fail_by(self._index(failures.stage), failures, self._rng(f"failures {number}"))
        self.scaler = self._scaler()

    def _rng(self, what: str) -> Random:
        """Return a generator for one use, so that the draws of others do not depend on it."""
        return Random(f"{self._scenario.seed} {what}")

    def _index(self, name: str) -> int:
        return next(at for at, stage in enumerate(self._scenario.stages) if stage.name == name)

    def _requests(self, workload: base.Workload) -> Iterator[Request]:
        until = self._scenario.duration_seconds
        if self._scenario.workload.concurrency is not None:
            return base.requests(workload, self._scenario.seed)
        return takewhile(lambda one: one.arrival < until, base.requests(workload, self._scenario.seed))

    def _make(self, stage: Stage) -> Make:
        scenario, sim = self._scenario, self.sim
        device = scenario.cluster.device
        if isinstance(stage, VideoStage):
            decoder = decoder_of(stage, device)
            self.sources[stage.name] = f"{decoder.source.kind.value}: {decoder.source.text}"
            rng, places, kind = self._rng(stage.name), stage.per_replica, stage.decoders
            if stage.collaborative:
                threads = 16 if kind == "cpu" else 1
                return lambda index, done: VideoServer(sim, done, decoder, places, kind, threads)
            return lambda index, done: stock_decoding(sim, done, decoder, places, rng, places, engines=kind == "nvdec")
        if isinstance(stage, ServersStage):
            self.sources[stage.name] = "assumed: the scenario's seconds"
            mean, exponential = stage.seconds, stage.service == "exponential"
            rng, places = self._rng(stage.name), stage.per_replica

            def service(job: Job, rng: Random) -> float:
                return rng.expovariate(1 / mean) if exponential else mean

            return lambda index, done: QueueServer(sim, done, places, service, rng)
        memory = stage.gpu_memory_utilization if isinstance(stage, EngineStage) else 0.9
        measured = None if stage.calibration is None else Path(stage.calibration)
        costs = engine_costs(stage.name, device, stage.model, measured, stage.devices, Efficiency(memory=memory))
        if isinstance(costs, MeasuredCosts) and isinstance(stage, EngineStage) and scenario.encoder_of(stage) == "lane":
            costs = costs.with_lane()
        if isinstance(costs, MeasuredCosts) and costs.calibration.step.steadiness:
            costs = UnsteadyCosts(costs, self._rng(f"{stage.name} steps"))
        self.sources[stage.name] = f"{costs.source.kind.value}: {costs.source.text}"
        if isinstance(stage, EncoderStage):
            items = stage.batch_items
            return lambda index, done: EncoderServer(sim, done, costs, items)
        watch = self._watcher(stage) if self._spans is not None else None
        engines = Engines(sim, scenario, stage, costs, self._itl_of(stage), watch, self.host)
        self.engines.append(engines)
        return engines

    def _itl_of(self, stage: EngineStage) -> Histogram:
        """Return the histogram for a stage's tokens; the times of tokens that no client sees are not counted."""
        answers = self._scenario.stages[self._scenario.output_stage]
        return self.itl if stage is answers or not isinstance(answers, EngineStage) else Histogram()

    def _watcher(self, stage: Stage) -> Callable[[int], Watcher]:
        spans = self._spans
        assert spans is not None

        def of(index: int) -> Watcher:
            def watch(name: str, start: float, seconds: float, **facts: float) -> None:
                if spans.wants(start):
                    spans.span(stage.name, index, name, start, seconds, facts)

            return watch

        return of

    def _left(self, stage_run: StageRun) -> None:
        """Record the span of a request in a stage; engines record their steps instead."""
        stage = self._scenario.stages[stage_run.stage]
        if self._spans is not None and not isinstance(stage, EngineStage) and self._spans.wants(stage_run.submitted):
            name, seconds = f"request {stage_run.request.number}", self.sim.now - stage_run.submitted
            self._spans.span(stage.name, stage_run.replica, name, stage_run.submitted, seconds)

    def _chooser(self, stage: Stage) -> Chooser:
        match stage.balance:
            case "cost":
                return BalancerChooser(CostBalancer(), self._rng(f"{stage.name} balance"))
            case "least_queue":
                return BalancerChooser(LeastQueue(), self._rng(f"{stage.name} balance"))
            case _:
                return RoundRobinChooser()

    def _links(self) -> dict[tuple[int, int], Links]:
        after = _successors(self._scenario.stages)
        return {
            (at, later): Links(self.sim, stage.link)
            for at, stage in enumerate(self._scenario.stages)
            for later in after[at]
            if stage.link.latency_seconds or stage.link.bytes_per_second is not None
        }

    def _scaler(self) -> ReactiveScaler | ForecastScaler | None:
        options = self._scenario.autoscale
        if options is None:
            return None
        at = self._index(options.stage)
        if options.mode == "reactive":
            return ReactiveScaler(self.pipeline, at, options)
        forecast = ForecastOptions(
            bin_seconds=options.every_seconds,
            season_bins=max(1, round(options.season_seconds / options.every_seconds)),
            horizon_seconds=options.start_seconds + options.every_seconds,
            guarded=options.mode == "forecast",
        )
        plan = PlanOptions(options.utilisation, 0.75 * options.utilisation, options.stabilisation_seconds)
        return ForecastScaler(self.pipeline, {at: options}, forecast, plan)

    def engines_by_stage(self) -> Iterator[tuple[EngineStage, EngineServer]]:
        """Yield all engines of the simulation, each with its stage."""
        for engines in self.engines:
            for server in engines.made:
                yield engines.stage, server

    def engine_servers(self) -> Iterator[EngineServer]:
        """Yield all engines of the simulation."""
        for engines in self.engines:
            yield from engines.made


def _scaled(scenario: Scenario, stage: Stage) -> bool:
    return scenario.autoscale is not None and scenario.autoscale.stage == stage.name


def _spec(scenario: Scenario, stage: Stage) -> StageSpec:
    kind = StageKind.AR if isinstance(stage, EngineStage) else StageKind.GENERATION
    if isinstance(stage, EngineStage):
        at_once = stage.max_num_seqs
    else:
        at_once = stage.batch_items if isinstance(stage, EncoderStage) else stage.per_replica
    starts = scenario.autoscale.start_seconds if scenario.autoscale and _scaled(scenario, stage) else 0.0
    devices = max(stage.devices_each, 1)
    return StageSpec(stage.name, kind, stage.replicas, at_once, starts, devices, _work(stage))


def _work(stage: Stage) -> Callable[[Request], Request] | None:
    """Return the function that adapts a request to the stage's own work; None if the request is used as it is."""
    if not isinstance(stage, EngineStage) or (stage.prompt_tokens is None and stage.tokens_each == 1):
        return None
    prompt, each = stage.prompt_tokens, stage.tokens_each

    def work(request: Request) -> Request:
        tokens = max(round(each * request.output_tokens), 1)
        if prompt is None:
            return replace(request, output_tokens=tokens)
        return replace(request, text_tokens=prompt, items=(), output_tokens=tokens)

    return work


def _sources(stages: tuple[Stage, ...]) -> list[tuple[int, ...]]:
    """Return the stages that each stage reads, by index."""
    names = [stage.name for stage in stages]
    return [
        tuple(map(names.index, stage.reads)) if stage.reads is not None else (at - 1,) if at else ()
        for at, stage in enumerate(stages)
    ]


def _successors(stages: tuple[Stage, ...]) -> list[list[int]]:
    sources = _sources(stages)
    return [[after for after in range(len(stages)) if at in sources[after]] for at in range(len(stages))]


def _paths(stages: tuple[Stage, ...]) -> dict[str, tuple[int, ...] | FlowPlan]:
    """Return the stages that requests of each modality visit: text is not encoded, only videos are decoded first.

    What reads a stage that is left out reads the sources of that stage. Without forks and joins, a path is returned.
    """
    sources, after = _sources(stages), _successors(stages)

    def goes(stage: Stage, modality: str) -> bool:
        if isinstance(stage, VideoStage):
            return modality == "video"
        return not isinstance(stage, EncoderStage) or modality != "text"

    def inputs(at: int, modality: str) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for source in sources[at]:
            found |= dict.fromkeys((source,) if goes(stages[source], modality) else inputs(source, modality))
        return tuple(found)

    def plan(modality: str) -> tuple[int, ...] | FlowPlan:
        path = tuple(at for at, stage in enumerate(stages) if goes(stage, modality))
        outputs = tuple(at for at in path if not after[at])
        found = FlowPlan(path, {at: inputs(at, modality) for at in path}, outputs)
        return path if path and found == FlowPlan.along(path) else found

    paths = {modality: plan(modality) for modality in _MODALITIES}
    return {
        modality: path
        for modality, path in {**paths, "": paths["image"]}.items()
        if (path.stages if isinstance(path, FlowPlan) else path)
    }

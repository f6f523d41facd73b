"""Define the scenario of one run: workload, cluster, targets, failures, scaling; and check what must fit together."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vllm_omni_sched.config.nearest import did_you_mean
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.stage_options.base import Options
from vllm_omni_sched.resource.engine.lane import LaneFacts, refusal
from vllm_omni_sched.sim.scenario.stages import EngineStage, Stage


def problems_of(scenario: "Scenario") -> Iterator[str]:
    """Yield each problem in one sentence, with dotted keys and the fix."""
    yield from _of_times(scenario)
    yield from _of_stages(scenario)
    yield from _of_steps(scenario)
    yield from _of_lanes(scenario)
    yield from _of_names(scenario)
    yield from _of_host(scenario)
    yield from _of_room(scenario)


def _of_times(scenario: "Scenario") -> Iterator[str]:
    if scenario.warm_up_seconds >= scenario.duration_seconds:
        yield (
            f"'warm_up_seconds' must be below 'duration_seconds': {scenario.warm_up_seconds:g} >= "
            f"{scenario.duration_seconds:g}; nothing would be measured"
        )
    if scenario.requests is not None and scenario.workload.rate is None:
        yield "'requests' needs 'workload.rate': set it, or set 'duration_seconds' instead"
    if scenario.workload.concurrency is not None and scenario.failures:
        yield "'workload.concurrency' and 'failures' are both set: a closed loop does not model clients that fail"
    if scenario.requests is not None and scenario.workload.concurrency is not None:
        yield "'requests' and 'workload.concurrency' are both set: set 'duration_seconds' instead of 'requests'"


def _of_stages(scenario: "Scenario") -> Iterator[str]:
    """Yield problems of the order of stages."""
    stages = scenario.stages
    if not stages:
        yield "there are no stages: add [[stages]] with name and kind"
    names = [stage.name for stage in stages]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"'stages.{name}' is given twice: names of stages must differ"
    seen: dict[str, str] = {}
    for stage in stages:
        for later in {"video": ("encoder", "engine"), "encoder": ("engine",)}.get(stage.kind, ()):
            if later in seen:
                yield (
                    f"'stages.{stage.name}' of kind '{stage.kind}' comes after 'stages.{seen[later]}' of kind "
                    f"'{later}': move it before"
                )
        seen.setdefault(stage.kind, stage.name)
    yield from _of_sources(scenario)
    if len(out := [stage.name for stage in stages if stage.output]) > 1:
        yield f"'stages.{out[1]}.output': 'stages.{out[0]}' has it already; only one stage answers the client"


def _of_sources(scenario: "Scenario") -> Iterator[str]:
    """Yield stages that read what is not before them."""
    names = [stage.name for stage in scenario.stages]
    for at, stage in enumerate(scenario.stages):
        key, reads = f"'stages.{stage.name}.reads'", stage.reads or ()
        for name in dict.fromkeys(reads):
            if name not in names[:at]:
                where = "comes after it" if name in names[at + 1 :] else "is itself" if name in names else "is none"
                yield f"{key} names {name!r}, which {where}: name stages before it, {', '.join(names[:at]) or 'none'}"
            elif reads.count(name) > 1:
                yield f"{key} names {name!r} twice: name it once"
        if stage.reads == () and at:
            yield f"{key} is empty, but only the first stage gets the request: name a stage before it"


def _of_steps(scenario: "Scenario") -> Iterator[str]:
    """Yield settings that vLLM's `SchedulerConfig` refuses."""
    for stage in scenario.stages:
        if isinstance(stage, EngineStage) and stage.max_num_batched_tokens < stage.max_num_seqs:
            key, tokens = f"stages.{stage.name}.max_num_batched_tokens", stage.max_num_batched_tokens
            yield (
                f"'{key}' is {tokens}, and vLLM does not start with fewer tokens in a step than requests at once, "
                f"'max_num_seqs' {stage.max_num_seqs}: lower the one or raise the other"
            )


def _of_lanes(scenario: "Scenario") -> Iterator[str]:
    """Yield settings that the product refuses at start, in its own words."""
    if not scenario.policy.encode_ahead:
        return
    for stage in scenario.stages:
        if not isinstance(stage, EngineStage):
            continue
        # a stage with a prompt of its own length gets no items: it is a text model
        if stage.prompt_tokens is None and scenario.encoder_of(stage) == "elsewhere":
            yield (
                f"'stages.{stage.name}': encodings come from another stage, and 'policy.encode_ahead' is true; this "
                "stage has nothing to encode ahead: set it to false"
            )
            continue
        facts = LaneFacts(multimodal=stage.prompt_tokens is None, workers=stage.devices)
        if (why_not := refusal(facts)) is not None:
            what = f"'stages.{stage.name}.devices' is {stage.devices}"
            yield f"'stages.{stage.name}': {what}, and 'policy.encode_ahead' is true; {why_not}"


def _of_names(scenario: "Scenario") -> Iterator[str]:
    """Yield references to stages that do not exist."""
    names = [stage.name for stage in scenario.stages]
    spoken = [(f"failures.{at}.stage", one.stage) for at, one in enumerate(scenario.failures)]
    if scenario.autoscale is not None:
        spoken.append(("autoscale.stage", scenario.autoscale.stage))
    for key, name in spoken:
        if name not in names:
            hint = did_you_mean(name, names) or f"stages are {', '.join(names) or 'missing'}"
            yield f"'{key}': there is no stage '{name}'; {hint}"
    scale = scenario.autoscale
    if scale is not None and scale.stage in names:
        replicas = scenario.stage(scale.stage).replicas
        if not scale.minimum <= replicas <= scale.maximum:
            yield (
                f"'stages.{scale.stage}.replicas' is {replicas}, outside 'autoscale.minimum' {scale.minimum} and "
                f"'autoscale.maximum' {scale.maximum}"
            )


def _of_host(scenario: "Scenario") -> Iterator[str]:
    """Yield engines on shared cores without a calibration, which only measurements can describe."""
    for stage in scenario.stages:
        if scenario.cluster.host_cores is not None and stage.kind == "engine" and stage.calibration is None:
            yield f"'cluster.host_cores' needs a calibration of each engine: 'stages.{stage.name}' has none"


def _of_room(scenario: "Scenario") -> Iterator[str]:
    """Yield needs that exceed the cluster."""
    cluster, scale = scenario.cluster, scenario.autoscale
    most = [
        scale.maximum if scale is not None and scale.stage == stage.name else stage.replicas
        for stage in scenario.stages
    ]
    for stage in scenario.stages:
        if stage.cores_each > cluster.cores_per_node:
            yield (
                f"'stages.{stage.name}.per_replica' is {stage.cores_each}, and a node has {cluster.cores_per_node} "
                "cores: lower it, or raise 'cluster.cores_per_node'"
            )
            return
    for what, there, each in (
        ("devices", cluster.devices_per_node, [stage.devices_each for stage in scenario.stages]),
        ("cores", cluster.cores_per_node, [stage.cores_each for stage in scenario.stages]),
    ):
        needs = list(zip(scenario.stages, most, each, strict=True))
        wanted = sum(replicas * one for _, replicas, one in needs)
        if wanted > cluster.nodes * there:
            parts = ", ".join(f"{stage.name} {replicas} × {one}" for stage, replicas, one in needs if one)
            yield (
                f"the stages need {wanted} {what} ({parts}), and the cluster has {cluster.nodes * there}: set "
                f"'cluster.nodes' to {-(-wanted // there)}, or ask for less"
            )


class Cluster(Options):
    """A cluster with nodes of one kind."""

    device: str = Field("a100-80gb", description="Accelerators: the name of one whose costs are known.")
    nodes: int = Field(1, ge=1, le=100_000, description="Nodes.")
    devices_per_node: int = Field(8, ge=1, le=1024, description="Accelerators of a node.")
    cores_per_node: int = Field(96, ge=1, le=4096, description="Processor cores of a node.")
    host_cores: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Cores that all engines share, with one front end; they slow each other down as their calibrations "
        "say. Default: each engine has its devices, and a front end, for itself.",
    )


class ClassTargets(Options):
    """Targets of one SLA class."""

    ttft_seconds: float = Field(gt=0, description="Time to first token.")
    itl_seconds: float = Field(gt=0, description="Each gap between tokens.")


class Slo(Options):
    """Targets of requests."""

    ttft_seconds: float = Field(2.0, gt=0, description="Time to first token.")
    itl_seconds: float = Field(0.1, gt=0, description="Each gap between tokens.")
    itl_of: Literal["each", "mean"] = Field(
        "each", description="`itl_seconds` is the target of each gap, or of a request's mean (its TPOT)."
    )
    attainment: float = Field(0.9, gt=0, le=1, description="Fraction of the requests that must meet both.")


class Failures(Options):
    """Failures of replicas: which, how often, and for how long."""

    stage: str = Field(description="Stage whose replicas die.")
    kind: Literal["replica", "rack"] = Field("replica", description="One replica, or `rack_replicas` at once.")
    every_seconds: float | None = Field(None, gt=0, description="Mean time between failures of the stage.")
    at_seconds: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (), strict=False, description="Times of failures, instead of `every_seconds`."
    )
    detection_seconds: float = Field(1.0, ge=0, description="Time until a death is noticed.")
    restart_seconds: float = Field(90.0, ge=0, description="Time until a restarted replica can work.")
    rack_replicas: int = Field(8, ge=1, description="Replicas that a rack holds.")

    @model_validator(mode="after")
    def _when(self) -> "Failures":
        if (self.every_seconds is None) == (not self.at_seconds):
            raise ValueError("give one of 'every_seconds' and 'at_seconds'")
        return self


class Autoscale(Options):
    """Scaling of a stage's replicas with the load."""

    stage: str = Field(description="Stage whose replicas are scaled.")
    minimum: int = Field(1, ge=1, description="Least replicas.")
    maximum: int = Field(ge=1, description="Most replicas.")
    start_seconds: float = Field(90.0, ge=0, description="Time until a new replica can work.")
    every_seconds: float = Field(30.0, gt=0, description="Time between decisions.")
    mode: Literal["reactive", "forecast", "forecast-unguarded"] = Field(
        "reactive",
        description="By the present load; by the forecast, whose guard uses the naive one while the model is "
        "worse; or by the model even then, to measure the effect of the guard.",
    )
    utilisation: float = Field(0.7, gt=0, le=1, description="Target utilisation of replicas.")
    at_once: int | None = Field(
        None,
        ge=1,
        description="Requests that a replica serves well together, for `reactive`; default: the most it may hold.",
    )
    capacity: float | None = Field(
        None, gt=0, description="Requests per second that a replica can serve, for forecasts; default: as measured."
    )
    season_seconds: float = Field(86_400.0, gt=0, description="Length of a season of the load, for forecasts.")
    stabilisation_seconds: float = Field(
        300.0,
        ge=0,
        description="Replicas that were not needed for so long are given up: all with `reactive`, else one at a time.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "Autoscale":
        if self.minimum > self.maximum:
            raise ValueError(
                f"'minimum' must not be above 'maximum': {self.minimum} > {self.maximum}; lower the one or raise the "
                "other"
            )
        return self


class Workload(Options):
    """Workload of a scenario."""

    kind: str = Field(min_length=1, description="Kind of workload; further keys depend on it.")
    rate: float | None = Field(
        None, gt=0, description="Mean requests per second; default: the workload's own, where it has one."
    )
    concurrency: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="A closed loop: so many requests are present at all times. The first ones arrive at `rate`; then "
        "one arrives when one leaves, until `duration_seconds`. Default: arrivals do not depend on others.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Further keys, written beside `kind`.")

    @model_validator(mode="before")
    @classmethod
    def _further(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        own = {key: inner for key, inner in value.items() if key in ("kind", "rate", "concurrency")}
        return own | {"options": {key: inner for key, inner in value.items() if key not in own}}

    def table(self) -> dict[str, Any]:
        """Return the table as written, without its kind."""
        return self.options if self.rate is None else {"rate": self.rate, **self.options}


class Scenario(Options):
    """One run. `loader.load` reads it and explains errors; the checks here need nothing from outside."""

    name: str = Field(min_length=1, description="Description of the simulation in a line.")
    seed: int = Field(1, ge=0, description="Seed of all random draws.")
    duration_seconds: float = Field(
        600.0,
        gt=0,
        description="Time over which requests arrive. Default: 600; with a workload of kind `trace` that is not "
        "repeated without end, its length.",
    )
    requests: int | None = Field(
        None,
        ge=1,
        description="Instead of `duration_seconds`: about so many requests arrive after the warm-up, however fast "
        "they arrive. Needs `workload.rate`; not with `workload.concurrency`.",
    )
    warm_up_seconds: float = Field(0.0, ge=0, description="Requests that arrive before are not measured.")
    drain_seconds: float | None = Field(
        None, ge=0, description="Time to go on after the last arrival; default: until all requests have left."
    )
    slo: Slo = Field(Slo(), description="Targets of requests.")
    classes: dict[str, ClassTargets] = Field(
        default_factory=dict, description="Targets of an SLA class, instead of `slo`."
    )
    workload: Workload = Field(description="Workload.")
    cluster: Cluster = Field(Cluster(), description="Cluster.")
    policy: OmniSchedConfig = Field(OmniSchedConfig(), description="Options of the engine's scheduler; none: stock.")
    orchestration: StageSchedConfig | None = Field(
        None, description="Options of the scheduler over stages; absent: round robin, no gate, no recovery."
    )
    stages: tuple[Stage, ...] = Field(strict=False, description="Stages of a request, in order.")
    failures: tuple[Failures, ...] = Field((), strict=False, description="Failures of replicas.")
    respawn: bool = Field(
        False,
        description="Without recovery, restart dead replicas, as Kubernetes does; their requests fail.",
    )
    autoscale: Autoscale | None = Field(None, description="Scaling with the load; absent: none.")

    @model_validator(mode="before")
    @classmethod
    def _long_enough(cls, value: Any) -> Any:
        """Derive the duration of arrivals from a number of requests."""
        if not isinstance(value, Mapping) or not isinstance(value.get("requests"), int):
            return value
        workload = value.get("workload")
        if not isinstance(workload, Mapping) or workload.get("concurrency") is not None:
            return value
        rate, warm_up = workload.get("rate"), value.get("warm_up_seconds", 0.0)
        if not (isinstance(rate, (int, float)) and isinstance(warm_up, (int, float))):
            return value
        if rate <= 0 or value["requests"] < 1:
            return value
        return {**value, "duration_seconds": warm_up + value["requests"] / rate}

    @model_validator(mode="after")
    def _possible(self) -> "Scenario":
        problems = list(problems_of(self))
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def stage(self, name: str) -> Stage:
        """Return the stage with that name.

        Raises:
            KeyError: there is no such stage.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    @property
    def output_stage(self) -> int:
        """Return the index of the stage whose output the client waits for."""
        return next((at for at, stage in enumerate(self.stages) if stage.output), len(self.stages) - 1)

    def encoder_of(self, stage: EngineStage) -> str:
        """Return where that engine's items are encoded: ``in_step``, ``lane`` or ``elsewhere``."""
        before = self.stages[: self.stages.index(stage)]
        if any(one.kind == "encoder" for one in before):
            return "elsewhere"
        return "lane" if self.policy.encode_ahead else "in_step"

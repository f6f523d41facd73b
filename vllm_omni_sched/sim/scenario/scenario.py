"""Define the scenario of one run: workload, cluster, targets, failures and scaling."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.stage_options.base import Options
from vllm_omni_sched.sim.scenario.checks import problems_of
from vllm_omni_sched.sim.scenario.stages import EngineStage, Stage


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
    monitored: bool = Field(
        False,
        description="Detect anomalies (`orchestration.monitoring.anomaly`), as in serving, and count them.",
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
        if stage.encoder is not None:
            return stage.encoder
        before = self.stages[: self.stages.index(stage)]
        if any(one.kind == "encoder" for one in before):
            return "elsewhere"
        return "lane" if self.policy.encode_ahead else "in_step"

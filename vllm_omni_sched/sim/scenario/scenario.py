"""Define the scenario of one run."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.config.stage_options.base import Options
from vllm_omni_sched.sim.scenario.checks import problems_of
from vllm_omni_sched.sim.scenario.cluster import Autoscale, ClassTargets, Cluster, Failures, Slo
from vllm_omni_sched.sim.scenario.stages import DeviceStage, EngineStage, Stage


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
    duration_seconds: float = Field(600.0, gt=0, description="Time over which requests arrive.")
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
        description="Detect anomalies (`orchestration.monitoring.anomaly`) and let the shares of memory pools "
        "(`orchestration.pools`) follow the demand, as in serving. Found anomalies are counted.",
    )
    stages: tuple[Stage, ...] = Field(description="Stages of a request, in order.")
    failures: tuple[Failures, ...] = Field((), description="Failures of replicas.")
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

    @field_validator("stages", "failures", mode="before")
    @classmethod
    def _sequence(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

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

    @property
    def placed(self) -> dict[int, DeviceStage]:
        """Return the stages that share devices, by index."""
        return {
            at: stage
            for at, stage in enumerate(self.stages)
            if isinstance(stage, DeviceStage) and stage.placed_on is not None
        }

    @property
    def shared_devices(self) -> int:
        """Return the number of accelerators that placed stages share."""
        return len(self.orchestration.graph.partition.devices) if self.orchestration is not None and self.placed else 0

    def targets(self, sla: str) -> tuple[float, float]:
        """Return the targets of an SLA class: seconds of TTFT and of inter-token latency."""
        one: ClassTargets | Slo = self.classes.get(sla, self.slo)
        return one.ttft_seconds, one.itl_seconds

"""One run: all that has to be known to simulate it."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from vllm_omni_sched.options import OmniSchedConfig
from vllm_omni_sched.sim.scenario.checks import problems_of
from vllm_omni_sched.sim.scenario.cluster import Autoscale, ClassTargets, Cluster, Failures, Slo
from vllm_omni_sched.sim.scenario.stages import EngineStage, Stage
from vllm_omni_sched.stage_options import StageSchedConfig
from vllm_omni_sched.stage_options.base import Options


class Workload(Options):
    """What arrives."""

    kind: str = Field(min_length=1, description="Which workload; further keys depend on it.")
    rate: float | None = Field(
        None, gt=0, description="Mean requests per second; default: the workload's own, where it has one."
    )
    concurrency: int | None = Field(
        None,
        ge=1,
        le=1_000_000,
        description="A closed loop: so many requests are here at all times. The first ones come at `rate`; from then "
        "on one comes when one leaves, until `duration_seconds`. Default: they come whether others leave or not.",
    )
    options: dict[str, Any] = Field(default_factory=dict, description="The further keys; written beside `kind`.")

    @model_validator(mode="before")
    @classmethod
    def _further(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        own = {key: inner for key, inner in value.items() if key in ("kind", "rate", "concurrency")}
        return own | {"options": {key: inner for key, inner in value.items() if key not in own}}

    def table(self) -> dict[str, Any]:
        """As it is written, without its kind."""
        return self.options if self.rate is None else {"rate": self.rate, **self.options}


class Scenario(Options):
    """One run. `loader.load` reads it and tells what is wrong; the checks here need nothing from outside."""

    name: str = Field(min_length=1, description="What is simulated, in a line.")
    seed: int = Field(1, ge=0, description="Of all that is random.")
    duration_seconds: float = Field(600.0, gt=0, description="Time over which requests arrive.")
    requests: int | None = Field(
        None,
        ge=1,
        description="In place of `duration_seconds`: about so many requests arrive after the warm-up, however fast "
        "they come. Needs `workload.rate`; not with `workload.concurrency`.",
    )
    warm_up_seconds: float = Field(0.0, ge=0, description="Requests that arrive before are not measured.")
    drain_seconds: float | None = Field(
        None, ge=0, description="How long to go on after the last arrival; default: until all have left."
    )
    slo: Slo = Field(Slo(), description="What is promised.")
    classes: dict[str, ClassTargets] = Field(
        default_factory=dict, description="What is promised to an SLA class, in place of `slo`."
    )
    workload: Workload = Field(description="What arrives.")
    cluster: Cluster = Field(Cluster(), description="What there is.")
    policy: OmniSchedConfig = Field(OmniSchedConfig(), description="Options of the engine's scheduler; none: stock.")
    orchestration: StageSchedConfig | None = Field(
        None, description="Options of the scheduler over stages; absent: round robin, no gate, no recovery."
    )
    stages: tuple[Stage, ...] = Field(description="What a request goes through, in order.")
    failures: tuple[Failures, ...] = Field((), description="What dies.")
    respawn: bool = Field(
        False,
        description="Without recovery, start dead replicas again, as Kubernetes does; what they had at work fails.",
    )
    autoscale: Autoscale | None = Field(None, description="What follows the load; absent: nothing.")

    @model_validator(mode="before")
    @classmethod
    def _long_enough(cls, value: Any) -> Any:
        """A number of requests says how long requests arrive."""
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
        """By its name.

        Raises:
            KeyError: there is none.
        """
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    @property
    def output_stage(self) -> int:
        """Index of the stage whose output the client waits for."""
        return next((at for at, stage in enumerate(self.stages) if stage.output), len(self.stages) - 1)

    def encoder_of(self, stage: EngineStage) -> str:
        """Where that engine's items are encoded: ``in_step``, ``lane`` or ``elsewhere``."""
        if stage.encoder is not None:
            return stage.encoder
        before = self.stages[: self.stages.index(stage)]
        if any(one.kind == "encoder" for one in before):
            return "elsewhere"
        return "lane" if self.policy.encode_ahead else "in_step"

    def targets(self, sla: str) -> tuple[float, float]:
        """Promised seconds of TTFT and of inter-token latency to that SLA class."""
        one: ClassTargets | Slo = self.classes.get(sla, self.slo)
        return one.ttft_seconds, one.itl_seconds

"""Define the cluster, the targets, the failures and the scaling of a scenario."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from vllm_omni_sched.config.stage_options.base import Options


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
    at_seconds: tuple[float, ...] = Field((), description="Times of failures, instead of `every_seconds`.")
    detection_seconds: float = Field(1.0, ge=0, description="Time until a death is noticed.")
    restart_seconds: float = Field(90.0, ge=0, description="Time until a restarted replica can work.")
    rack_replicas: int = Field(8, ge=1, description="Replicas that a rack holds.")

    @field_validator("at_seconds", mode="before")
    @classmethod
    def _sequence(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

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

"""Options of batching in a stage."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from vllm_omni_sched.config.stage_options.base import Options
from vllm_omni_sched.config.units import Milliseconds
from vllm_omni_sched.config.validators import keys_as_text

ALIASES = {"latency_target": "target_latency_ms", "adjustment_interval": "adjust_interval_ms"}
"""Names of the design article."""

OF_CONTROLLER = ("min_batch_size", "max_batch_size", "adjust_interval_ms", "memory_high")
"""Options that only matter where `target_latency_ms` is given."""


class ProgressiveOptions(Options):
    """Options of long work, of which as much starts at once as the latency target allows."""

    enabled: bool = Field(
        False,
        description="Limit how much long text and high-resolution generation starts at once, in stages that have a "
        "`target_latency_ms`.",
    )
    first_units: int = Field(
        64, ge=1, description="Work of at most this size does not wait: prompt tokens, or diffusion steps × latents."
    )
    growth: float = Field(2.0, gt=1, description="Factor by which the limit grows while the target is met.")
    shrink: float = Field(0.5, gt=0, lt=1, description="Factor by which the limit shrinks when the target is missed.")

    @model_validator(mode="after")
    def _enabled(self) -> "ProgressiveOptions":
        self.check_enabled()
        return self


class StageBatchOptions(Options):
    """Options that differ in one stage; null: as for all stages."""

    aliases: ClassVar[Mapping[str, str]] = ALIASES

    min_batch_size: int | None = Field(None, ge=1, description="Least limit.")
    max_batch_size: int | None = Field(None, ge=1, description="Largest limit.")
    target_latency_ms: Milliseconds | None = Field(None, gt=0, description="Target latency in milliseconds.")
    adjust_interval_ms: Milliseconds | None = Field(
        None, gt=0, description="Least time between two decisions, in milliseconds."
    )
    hold_ms: Milliseconds | None = Field(
        None, ge=0, description="How long a batch may wait for more requests, in milliseconds."
    )


class BatchLimits(Options):
    """Options of the batches of one stage."""

    aliases: ClassVar[Mapping[str, str]] = ALIASES

    target_latency_ms: Milliseconds | None = Field(
        None,
        gt=0,
        description="Target latency in milliseconds, such as `50ms`. If given, a PID controller limits the requests of "
        "each replica that the latency is of: in an autoregressive stage those without an output yet, whose time to "
        "the first output it is, and in any other stage all of them. null: as many as the stage's own `max_num_seqs`.",
    )
    min_batch_size: int = Field(1, ge=1, description="Least limit of the controller.")
    max_batch_size: int = Field(32, ge=1, description="Largest limit of the controller.")
    adjust_interval_ms: Milliseconds = Field(
        1000.0, gt=0, description="Least time between two decisions of the controller, in milliseconds."
    )
    hold_ms: Milliseconds = Field(
        0.0,
        ge=0,
        description="How long a batch of a stage that is not autoregressive may wait for more requests while its "
        "replicas are busy, in milliseconds.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> "BatchLimits":
        if self.min_batch_size > self.max_batch_size:
            raise ValueError(_crossed("", self.min_batch_size, self.max_batch_size))
        return self


def _crossed(prefix: str, least: int, most: int) -> str:
    return (
        f"option '{prefix}min_batch_size' must not be above '{prefix}max_batch_size': {least} > {most}; "
        "lower the one or raise the other"
    )


class BatchingOptions(BatchLimits):
    """Options of the batches of all stages."""

    memory_high: float = Field(
        0.95, gt=0, le=1, description="Fraction of the host's memory in use above which limits fall and do not rise."
    )
    progressive: ProgressiveOptions = Field(ProgressiveOptions(), description="How much long work runs at once.")
    stages: dict[str, StageBatchOptions] = Field(
        default_factory=dict, description="Options that differ in a stage, by its name or id."
    )

    @field_validator("stages", mode="before")
    @classmethod
    def _ids(cls, value: Any) -> Any:
        return keys_as_text(value)

    @model_validator(mode="after")
    def _each_stage(self) -> "BatchingOptions":
        for key, own in self.stages.items():
            least = self.min_batch_size if own.min_batch_size is None else own.min_batch_size
            most = self.max_batch_size if own.max_batch_size is None else own.max_batch_size
            if least > most:
                raise ValueError(_crossed(f"stages.{key}.", least, most))
        return self

    @model_validator(mode="after")
    def _controlled(self) -> "BatchingOptions":
        """Refuse options of a controller that runs in no stage: they would have no effect."""
        if self.has_target:
            return self
        options = {name: (getattr(self, name), type(self).model_fields[name].default) for name in OF_CONTROLLER}
        given = [name for name, (value, default) in options.items() if value != default]
        given += ["progressive.enabled"] if self.progressive.enabled else []
        given += [
            f"stages.{key}.{name}"
            for key, own in self.stages.items()
            for name in OF_CONTROLLER
            if getattr(own, name, None) is not None
        ]
        if given:
            raise ValueError(
                f"option '{given[0]}' needs 'target_latency_ms': name the latency to aim at, or remove it; how many "
                "requests a stage runs at once without a target is its own 'max_num_seqs' in the deploy YAML"
            )
        return self

    @property
    def has_target(self) -> bool:
        """Return whether a latency target is given, for all stages or for one."""
        return any(getattr(one, "target_latency_ms", None) is not None for one in (self, *self.stages.values()))

    def of_stage(self, stage_id: int, name: str = "") -> BatchLimits:
        """Return the limits of one stage, including the options that differ in it."""
        common = {field: getattr(self, field) for field in BatchLimits.model_fields}
        own = self.stages.get(str(stage_id)) or self.stages.get(name)
        return BatchLimits(**common | (own.model_dump(exclude_none=True) if own else {}))

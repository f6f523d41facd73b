"""Options of batching in a stage."""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from vllm_omni_sched.config.stage_options.base import Options
from vllm_omni_sched.config.units import Milliseconds
from vllm_omni_sched.config.validators import keys_as_text

ALIASES = {"latency_target": "target_latency_ms", "adjustment_interval": "adjust_interval_ms"}
"""Names of the design article."""


class ProgressiveOptions(Options):
    """Options of long work, which runs beside other work as far as the target allows."""

    enabled: bool = Field(
        True,
        description="Limit how much long text and high-resolution generation runs at once; needs `batching.enabled`.",
    )
    first_units: int = Field(
        64, ge=1, description="Work of at most this size does not wait: prompt tokens, or diffusion steps × latents."
    )
    growth: float = Field(2.0, gt=1, description="Factor by which the limit grows while the target is met.")
    shrink: float = Field(0.5, gt=0, lt=1, description="Factor by which the limit shrinks when the target is missed.")


class StageBatchOptions(Options):
    """Options that differ in one stage; null: as for all stages."""

    aliases: ClassVar[Mapping[str, str]] = ALIASES

    enabled: bool | None = Field(None, description="Control the size of this stage's batches.")
    min_batch_size: int | None = Field(None, ge=1, description="Least requests of a batch.")
    max_batch_size: int | None = Field(None, ge=1, description="Most requests of a batch.")
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

    enabled: bool = Field(
        True,
        description="Control how many requests a replica runs at once by their latency (PID); otherwise always as many "
        "as `max_batch_size` and the stage's own `max_num_seqs` allow.",
    )
    min_batch_size: int = Field(1, ge=1, description="Least requests of a batch.")
    max_batch_size: int = Field(32, ge=1, description="Most requests of a batch.")
    target_latency_ms: Milliseconds = Field(
        50.0,
        gt=0,
        description="Target latency in milliseconds: in an autoregressive stage from sending a request to a "
        "replica until its first output, in any other until it is done. If a request alone takes more than half of "
        "it, the target is twice that time.",
    )
    adjust_interval_ms: Milliseconds = Field(
        1000.0, gt=0, description="Least time between two decisions, in milliseconds."
    )
    hold_ms: Milliseconds = Field(
        50.0, ge=0, description="How long a batch may wait for more requests, where that pays, in milliseconds."
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

    kp: float = Field(0.2, ge=0, description="Proportional gain, on logarithms.")
    ki: float = Field(0.4, gt=0, description="Integral gain.")
    kd: float = Field(0.05, ge=0, description="Derivative gain.")
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

    def of_stage(self, stage_id: int, name: str = "") -> BatchLimits:
        """Return the limits of one stage, including the options that differ in it."""
        common = {field: getattr(self, field) for field in BatchLimits.model_fields}
        own = self.stages.get(str(stage_id)) or self.stages.get(name)
        return BatchLimits(**common | (own.model_dump(exclude_none=True) if own else {}))

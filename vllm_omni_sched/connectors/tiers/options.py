"""Options of tiers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_omni_sched.connectors.arena.options import KIB
from vllm_omni_sched.connectors.bounds import Seconds, StoredBytes
from vllm_omni_sched.connectors.disk import DiskOptions
from vllm_omni_sched.connectors.mooncake import MooncakeOptions


class TierRules(BaseModel):
    """Rules for moving messages. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    high_water: float = Field(
        0.85, gt=0, le=1, description="A tier, or a pool of it, that is fuller than this part has messages moved down."
    )
    low_water: float = Field(0.7, gt=0, le=1, description="Until it is no fuller than this part.")
    recompute_seconds: dict[str, float] = Field(
        default_factory=dict,
        description="What computing a message again would take, by edge ('0->1'): it is not moved where going there "
        "and back takes longer. Default: it cannot be computed again.",
    )
    expected_wait_seconds: Seconds = Field(
        1.0, gt=0, description="How long messages wait for their receivers, until that was learnt for their edge."
    )
    long_wait_seconds: Seconds = Field(
        30.0, gt=0, description="What is expected to wait longer goes down at once, where the first tier is filling up."
    )
    soon_seconds: Seconds = Field(
        0.5, ge=0, description="What is expected to be wanted within it, and the time of moving, comes up again."
    )
    bytes_per_second: float = Field(
        1e9, gt=0, allow_inf_nan=False, description="Of tiers below the first, until it was measured."
    )
    min_bytes: StoredBytes = Field(64 * KIB, ge=0, description="Smaller messages are not moved.")
    interval_seconds: Seconds = Field(0.05, gt=0, description="Time between two looks at what should move.")
    ttl_seconds: Seconds = Field(
        600.0, gt=0, description="A message nobody gets for so long is dropped, wherever it lies."
    )

    @model_validator(mode="after")
    def _consistent(self) -> TierRules:
        if self.low_water > self.high_water:
            raise ValueError(f"low_water ({self.low_water}) must not be above high_water ({self.high_water})")
        return self


class TiersOptions(TierRules):
    """Options of the tiers below the paths, and the rules for moving messages. Unknown keys are errors."""

    mooncake: MooncakeOptions | None = Field(None, description="Options of a Mooncake store as a tier; null: none.")
    disk: DiskOptions | None = Field(DiskOptions(), description="Options of files as a tier; null: none.")
    order: list[Literal["mooncake", "disk"]] = Field(
        ["mooncake", "disk"], description="From the upper to the lower; those that are not there are left out."
    )

    @model_validator(mode="after")
    def _some(self) -> TiersOptions:
        there = [name for name in self.order if getattr(self, name) is not None]
        if not there or len(set(self.order)) < len(self.order):
            raise ValueError("order must name a tier that has options (`disk` or `mooncake`), and each once")
        return self

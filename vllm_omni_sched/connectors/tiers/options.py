"""Options of tiers."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_omni_sched.config.units import FractionalBytes
from vllm_omni_sched.connectors.arena.options import KIB
from vllm_omni_sched.connectors.bounds import Seconds, StoredBytes
from vllm_omni_sched.connectors.disk import DiskOptions
from vllm_omni_sched.connectors.mooncake import MooncakeOptions


class TierRules(BaseModel):
    """Rules for moving messages. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    high_water: float = Field(
        0.85, gt=0, le=1, description="Fraction of a tier, or of one of its pools, above which messages are moved down."
    )
    low_water: float = Field(0.7, gt=0, le=1, description="Fraction down to which messages are moved.")
    recompute_seconds: dict[str, float] = Field(
        default_factory=dict,
        description="Time to compute a message again, by edge ('0->1'): a message is not moved if moving it down "
        "and up again takes longer. Default: messages cannot be computed again.",
    )
    expected_wait_seconds: Seconds = Field(
        1.0, gt=0, description="Expected waiting time of messages, until it was learnt for their edge."
    )
    long_wait_seconds: Seconds = Field(
        30.0,
        gt=0,
        description="Messages that are expected to wait longer go down at once if the first tier is filling up.",
    )
    soon_seconds: Seconds = Field(
        0.5,
        ge=0,
        description="Messages that are expected to be needed within this time, plus that of the move, move up again.",
    )
    bytes_per_second: FractionalBytes = Field(
        1e9,
        gt=0,
        allow_inf_nan=False,
        description="Expected throughput of tiers below the first, until it was measured.",
    )
    min_bytes: StoredBytes = Field(64 * KIB, ge=0, description="Smaller messages are not moved.")
    interval_seconds: Seconds = Field(0.05, gt=0, description="Time between two checks for messages to move.")
    ttl_seconds: Seconds = Field(
        600.0, gt=0, description="Age at which a message that was not received is dropped, in any tier."
    )

    @model_validator(mode="after")
    def _consistent(self) -> TierRules:
        if self.low_water > self.high_water:
            raise ValueError(f"low_water ({self.low_water}) must not be above high_water ({self.high_water})")
        return self


class TiersOptions(TierRules):
    """Options of the tiers below the first, and the rules for moving messages. Unknown keys are errors."""

    mooncake: MooncakeOptions | None = Field(None, description="Options of a Mooncake store as a tier; null: none.")
    disk: DiskOptions | None = Field(DiskOptions(), description="Options of files as a tier; null: none.")
    order: list[Literal["mooncake", "disk"]] = Field(
        ["mooncake", "disk"], description="Tiers from the upper to the lower; those without options are left out."
    )

    @model_validator(mode="after")
    def _some(self) -> TiersOptions:
        there = [name for name in self.order if getattr(self, name) is not None]
        if not there or len(set(self.order)) < len(self.order):
            raise ValueError("order must name a tier that has options (`disk` or `mooncake`), and each once")
        return self

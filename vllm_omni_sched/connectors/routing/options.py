"""Options of routing, with their defaults."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from vllm_omni_sched.connectors.bounds import Count, Seconds


class RoutingOptions(BaseModel):
    """Options of routing. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    edges: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Paths that reach the receiver of an edge ('0->1'), by name; default: those between hosts, and "
        "those within this host while the receiver's stage is on it.",
    )
    replicas: dict[str, int] = Field(
        default_factory=dict,
        description="How many replicas a stage ('1') has on all hosts together, where some are on others; default: "
        "those that are found here.",
    )
    trial_every: Count = Field(
        500, ge=1, description="A path that was not used for so many messages of an edge is tried, to measure it."
    )
    first_retry_seconds: Seconds = Field(0.5, gt=0, description="When a sick path is tried again; then twice that.")
    longest_retry_seconds: Seconds = Field(30.0, gt=0, description="The most that this becomes.")

"""Options of routing, with their defaults."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_omni_sched.connectors.bounds import Seconds


class RoutingOptions(BaseModel):
    """Options of routing. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    edges: dict[str, list[str]] = Field(
        default_factory=dict,
        description="Transports that reach the receiver of an edge ('0->1'), by name; default: those between hosts, "
        "and those within this host while the receiver's stage is on it.",
    )
    replicas: dict[str, int] = Field(
        default_factory=dict,
        description="How many replicas a stage ('1') has on all hosts together, if some are on other hosts; default: "
        "the replicas that are found on this host.",
    )
    first_retry_seconds: Seconds = Field(
        0.5, gt=0, description="Pause after which a sick transport is tried again; doubled after each refusal."
    )
    longest_retry_seconds: Seconds = Field(
        30.0, gt=0, description="Longest pause before a sick transport is tried again."
    )

    @field_validator("edges")
    @classmethod
    def _edges_are_named(cls, value: dict[str, list[str]]) -> dict[str, list[str]]:
        for edge, ways in value.items():
            stages = edge.split("->")
            if len(stages) != 2 or not all(stages) or edge != "".join(edge.split()):
                raise ValueError(f"{edge!r} names no edge: write the ids of its two stages, as '0->1'")
            if not ways:
                raise ValueError(f"{edge!r} has no transport: name one or more, or leave it out for all of them")
        return value

    @field_validator("replicas", mode="before")
    @classmethod
    def _stages_are_named(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for stage, count in value.items():
                if not str(stage).strip() or "->" in str(stage):
                    raise ValueError(f"{stage!r} names no stage: write its id, as '1'")
                if isinstance(count, bool) or (isinstance(count, int) and count < 1):
                    raise ValueError(
                        f"stage {stage!r} must have 1 replica or more, got {count}; leave out what has none"
                    )
        return value

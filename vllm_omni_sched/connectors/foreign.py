"""Options of vLLM-Omni's own connectors, used as paths of the composite; `omni` makes paths of them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class ForeignOptions(BaseModel):
    """Options of one of vLLM-Omni's own connectors as a path. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, description="Name of the connector as in a stage config, such as `NixlConnector`.")
    distance: int = Field(1, ge=0, le=9, description="0: it reaches processes of this host; 1: other hosts, too.")
    extra: dict[str, Any] = Field(default_factory=dict, description="Options of the connector.")
    checksum: bool | None = Field(
        None,
        description="Messages carry a CRC-32 of their tensors, and one that was altered on its way is an error; "
        "default: those to other hosts do.",
    )
    mail: str | None = Field(
        None, description="Path that tells receivers where a message lies, where it needs that; default: the farthest."
    )

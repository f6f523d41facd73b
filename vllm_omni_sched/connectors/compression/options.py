"""Options of compression, with their defaults, bounds and meaning."""

import re
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_omni_sched.connectors.bounds import MemoryBytes

EDGE = re.compile(r"[^\s>]+->[^\s>]+")
"""``from_stage->to_stage``, such as ``0->1``."""


class Mode(str, Enum):
    """Mode of compression."""

    OFF = "off"
    AUTO = "auto"  # if it pays
    ALWAYS = "always"


class Lossy(str, Enum):
    """Lossy codec that an edge allows, beside all lossless ones."""

    NONE = "none"
    INT8 = "int8"
    MULAW = "mulaw"


def _mode(value: Any) -> Any:
    if value is False:  # YAML's off
        return Mode.OFF
    return Mode(value) if isinstance(value, str) and value in {m.value for m in Mode} else value


class EdgeOptions(BaseModel):
    """Options that differ for one edge."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: Mode | None = Field(None, description="Mode of this edge; default: the mode of all edges.")
    lossy: Lossy = Field(
        Lossy.NONE,
        description="The lossy codec that this edge allows: 'int8' of float features, 'mulaw' of audio.",
    )
    min_bytes: MemoryBytes | None = Field(
        None,
        ge=0,
        description="Size below which buffers of this edge are sent raw, in bytes; default: that of all edges.",
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _read_mode(cls, value: Any) -> Any:
        return _mode(value)

    @field_validator("lossy", mode="before")
    @classmethod
    def _read_lossy(cls, value: Any) -> Any:
        return Lossy(value) if isinstance(value, str) and value in {one.value for one in Lossy} else value


class CompressionOptions(BaseModel):
    """Options of compression. A lossy codec is allowed for single edges only."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    mode: Mode = Field(
        Mode.AUTO,
        description="'auto': if encoding, sending and decoding takes less time than sending, by the speed of the link "
        "and what earlier buffers shrank to; 'always': whatever shrinks; 'off': nothing.",
    )
    min_bytes: MemoryBytes = Field(16 << 10, ge=0, description="Smaller buffers are sent as they are, in bytes.")
    cache_bytes: MemoryBytes = Field(
        0,
        ge=0,
        description="Memory for compressed buffers, in bytes, so that what goes to several consumers is compressed "
        "once; worth it only where that happens. 0 keeps none.",
    )
    edges: dict[str, EdgeOptions] = Field(
        {}, description="Options of single edges, by 'from_stage->to_stage', such as '0->1'."
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _read_mode(cls, value: Any) -> Any:
        return _mode(value)

    @field_validator("edges")
    @classmethod
    def _read_edges(cls, value: dict[str, EdgeOptions]) -> dict[str, EdgeOptions]:
        for edge in value:
            if not EDGE.fullmatch(edge):
                raise ValueError(f"an edge is written 'from_stage->to_stage', such as '0->1', got {edge!r}")
        return value

    def of_edge(self, edge: str) -> "ForEdge":
        """Return the options that apply to this edge."""
        own = self.edges.get(edge, EdgeOptions())
        return ForEdge(
            mode=self.mode if own.mode is None else own.mode,
            lossy=None if own.lossy is Lossy.NONE else own.lossy.value,
            min_bytes=self.min_bytes if own.min_bytes is None else own.min_bytes,
        )


@dataclass(frozen=True)
class ForEdge:
    """The resolved options of one edge; ``lossy`` is a codec's name."""

    mode: Mode
    lossy: str | None
    min_bytes: int

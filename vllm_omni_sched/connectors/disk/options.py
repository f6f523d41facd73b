"""Options of the transport through files."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_omni_sched.connectors.arena.options import GIB, KIB, arena_name
from vllm_omni_sched.connectors.bounds import Seconds, StoredBytes


class DiskOptions(BaseModel):
    """Options of the transport through files. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    directory: str = Field("/var/tmp", description="Directory of the messages; its file system must not be in memory.")
    arena: str | None = Field(
        None,
        description="Name of the arena; processes with the same name see each other's messages; default: all processes "
        "that one vLLM-Omni has started.",
    )
    max_bytes: StoredBytes = Field(8 * GIB, ge=64 * KIB, description="Most bytes that a process keeps there.")
    ttl_seconds: Seconds = Field(
        600.0, gt=0, description="Age at which a message that was not received is dropped, and counted."
    )

    checksum: bool = Field(
        True, description="Messages carry a CRC-32 of their tensors, and one that was altered in its file is an error."
    )

    @field_validator("arena")
    @classmethod
    def _file_name(cls, value: str | None) -> str | None:
        return None if value is None else arena_name(value)

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: str) -> str:
        if not value.startswith("/"):
            raise ValueError("must be absolute: the processes that meet there may work in different directories")
        return value

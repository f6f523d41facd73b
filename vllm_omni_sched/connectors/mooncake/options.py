"""Options of the Mooncake transport, with their defaults: ``extra`` of a connector in vLLM-Omni's stage config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_omni_sched.connectors.bounds import Count, MemoryBytes, Seconds, StoredBytes

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/]+):(?P<port>\d{1,5})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class MooncakeOptions(BaseModel):
    """Options of the Mooncake transport. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", min_length=1, description="Address of this host that other hosts can reach.")
    metadata_server: str = Field("P2PHANDSHAKE", min_length=1, description="As in Mooncake.")
    master: str = Field("127.0.0.1:50051", description="Address of `mooncake_master`.")
    segment: MemoryBytes = Field(512 * MIB, ge=0, description="Bytes of this process's part of the store.")
    localbuf: MemoryBytes = Field(
        64 * MIB, ge=MIB, description="Bytes of this process's registered buffers; touched as they are used."
    )
    proto: Literal["auto", "tcp", "rdma"] = Field("auto", description="auto: rdma where this host has a device for it.")
    rdma: str = Field("", description="Devices for rdma; empty: all.")
    namespace: str = Field("omni", description="Processes that name the same namespace see each other's messages.")
    connect_timeout_seconds: Seconds = Field(10.0, gt=0, description="How long to wait for the master at the start.")
    call_timeout_seconds: Seconds = Field(3.0, gt=0, description="How long the master may take to answer.")
    slowest_bytes_per_second: MemoryBytes = Field(20 * MIB, ge=1, description="A transfer that is slower is given up.")
    max_inflight: Count | None = Field(
        None,
        ge=1,
        description="Most messages of an edge that are not received yet; beyond it, `put` waits for the receiver.",
    )
    window_size: StoredBytes | None = Field(
        None,
        ge=1,
        description="Most bytes of an edge that are not received yet; beyond it, `put` waits for the receiver.",
    )
    put_timeout_seconds: Seconds = Field(30.0, ge=0, description="How long `put` waits for room or for its receiver.")
    ttl_seconds: Seconds = Field(
        600.0, gt=0, description="Age at which a message that was not received is dropped, and counted."
    )
    poll_seconds: Seconds = Field(5e-3, gt=0, description="Longest wait between two searches for a message.")
    copy_out: bool = Field(False, description="Receivers get copies, not views of registered buffers.")
    checksum: bool = Field(
        True, description="Messages carry a CRC-32 of their tensors, and one that was altered on its way is an error."
    )

    @field_validator("master")
    @classmethod
    def _address(cls, value: str) -> str:
        found = _ADDRESS.fullmatch(value)
        if found is None or not 0 < int(found["port"]) < 1 << 16:
            raise ValueError(f"{value!r} is no address: give host:port")
        return value

    @field_validator("namespace")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-'")
        return value

    @property
    def master_address(self) -> tuple[str, int]:
        host, _, port = self.master.rpartition(":")
        return host.strip("[]"), int(port)

    def protocol(self, devices: Path = Path("/sys/class/infiniband")) -> str:
        """Return the protocol, tcp or rdma.

        Args:
            devices: where Linux lists the devices for rdma.
        """
        if self.proto != "auto":
            return self.proto
        return "rdma" if devices.is_dir() and any(devices.iterdir()) else "tcp"

    def transfer_seconds(self, nbytes: int) -> float:
        """Return how long a transfer of ``nbytes`` may take, in seconds."""
        return self.call_timeout_seconds + nbytes / self.slowest_bytes_per_second

"""Scenarios for tests: one that is right, and the names that it may use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.scenario.loader import KnownNames


class Images(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    rate: float
    pictures: int = 1


class Trace(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    rate: float | None = None
    file: str


class Nested(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    rate: float
    of: dict[str, Any]


def make_workload(table: Mapping[str, Any], where: str, folder: Path) -> object:
    if table.get("pictures") == 13:
        raise ConfigError(f"{where}: there are never 13 pictures")
    return table


KNOWN = KnownNames(
    devices=("a100-80gb", "h100-80gb"),
    models=("qwen2.5-vl-7b", "qwen2.5-vl-32b"),
    workloads={"servegen-mm-image": Images, "text": Images, "video-clips": Images, "trace": Trace, "day-night": Nested},
    make_workload=make_workload,
)

GOOD = """
name = "pictures on one node"
seed = 3
duration_seconds = 100
warm_up_seconds = 10.0

[slo]
ttft_seconds = 2.0
itl_seconds = 0.1
attainment = 0.9

[workload]
kind = "servegen-mm-image"
rate = 4
pictures = 2

[cluster]
device = "a100-80gb"

[policy]
encode_ahead = true

[orchestration.balancing]
policy = "least-queue"

[[stages]]
name = "video"
kind = "video"
per_replica = 16

[[stages]]
name = "llm"
kind = "engine"
model = "qwen2.5-vl-7b"
replicas = 8

[[stages]]
name = "speech"
kind = "servers"
seconds = { distribution = "hyperexponential", mean = 0.5, cv = 2.0 }

[[failures]]
stage = "llm"
every_seconds = 60.0
"""

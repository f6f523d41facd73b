"""Describe which pipeline a run starts, and what it asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dev.omni_cpu.spec import PipelineSpec

SHM = Path("/dev/shm")  # where vLLM-Omni's own connector keeps payloads, under the names of their requests


@dataclass(frozen=True)
class RunSpec(PipelineSpec):
    """A pipeline, and what is asked of it (`scenarios.py`, `stage_scenarios.py`)."""

    scenarios: Sequence[str] = ("one_by_one", "together", "one_leaves")

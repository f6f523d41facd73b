"""Paths through files and over tiers, as small as tests want them."""

from __future__ import annotations

from typing import Any

from tests.support.arena import MIB
from vllm_omni_sched.connectors.base import Path
from vllm_omni_sched.connectors.disk import DiskOptions, DiskPath


def files(root: str, **options: Any) -> DiskOptions:
    """Of a path through files under ``root``."""
    return DiskOptions.model_validate({"directory": root, "arena": "files", "max_bytes": 96 * MIB, **options})


def disk(root: str) -> Path:
    return DiskPath(files(root))

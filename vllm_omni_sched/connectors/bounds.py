"""Types of options with upper bounds: far above any need, and within what system calls accept."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vllm_omni_sched.config.units import Bytes

MemoryBytes = Annotated[Bytes, Field(le=1 << 40)]
"""Memory of one kind in one process, in bytes: at most a terabyte."""
StoredBytes = Annotated[Bytes, Field(le=1 << 50)]
"""Storage in files, or in a store of many hosts, in bytes: at most a petabyte."""
Count = Annotated[int, Field(le=1 << 30)]
Seconds = Annotated[float, Field(le=1e9, allow_inf_nan=False)]
"""A duration in seconds: at most thirty years."""

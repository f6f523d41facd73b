"""Types of options with upper bounds: far above what anybody needs, and below what the system's calls can be given."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

MemoryBytes = Annotated[int, Field(le=1 << 40)]
"""Of one kind, set aside by one process: at most a terabyte."""
StoredBytes = Annotated[int, Field(le=1 << 50)]
"""In files, or in a store of many hosts: at most a petabyte."""
Count = Annotated[int, Field(le=1 << 30)]
Seconds = Annotated[float, Field(le=1e9, allow_inf_nan=False)]
"""At most thirty years."""

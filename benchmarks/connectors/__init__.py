"""How long does a message between two processes of a host take with each connector, against vLLM-Omni's own?"""

from __future__ import annotations

from typing import Any

THEIRS = "SharedMemoryConnector"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    THEIRS: (THEIRS, {}),
    "ArenaConnector": ("ArenaConnector", {}),
    "with checksum": ("ArenaConnector", {"checksum": True}),
}
"""Connector and its ``extra``; all other options are the defaults."""

SIZES = {"1 KB": 1 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "256 MB": 256 << 20}

"""In a pipeline that runs: how long until the next stage has what a stage has put, against vLLM-Omni's connector?"""

from __future__ import annotations

from typing import Any

THEIRS = "SharedMemoryConnector"
SMALL = {"initial_bytes": 32 << 20, "max_bytes": 1 << 30}
ARENA = {"text": SMALL, "image": SMALL, "audio": SMALL}
VARIANTS: dict[str, dict[str, Any]] = {THEIRS: {}, "ArenaConnector": ARENA, "OmniAutoConnector": {"arena": ARENA}}
"""``extra`` of each connector; less room set aside than by default, all else as it is."""

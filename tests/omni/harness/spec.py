"""Which pipeline a run starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Mode = Literal["async_chunk", "full_payload"]
MODES: tuple[Mode, ...] = ("async_chunk", "full_payload")

SHM = Path("/dev/shm")  # where vLLM-Omni's own connector keeps payloads, under the names of their requests

# the stages of each pipeline (`cpu/pipelines.py`, which only vLLM-Omni's processes can import)
TEXT_TO_TEXT = "tiny_text_to_text"
TEXT_TO_SOUND = "tiny_text_to_sound"
STAGES = {TEXT_TO_TEXT: 2, TEXT_TO_SOUND: 3}


@dataclass(frozen=True)
class PipelineSpec:
    """One pipeline, its mode, the connector on all its edges, by name and `extra`, and what is asked of it
    (`scenarios.py`). It travels as JSON.
    """

    pipeline: str
    mode: Mode
    connector: str = "SharedMemoryConnector"
    extra: Mapping[str, Any] = field(default_factory=dict)
    scenarios: Sequence[str] = ("one_by_one", "together", "one_leaves")

    @property
    def edges(self) -> list[tuple[str, str]]:
        return [(str(stage), str(stage + 1)) for stage in range(STAGES[self.pipeline] - 1)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

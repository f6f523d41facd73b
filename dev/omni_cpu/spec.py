"""Which pipeline a run starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Mode = Literal["async_chunk", "full_payload"]
MODES: tuple[Mode, ...] = ("async_chunk", "full_payload")

# the stages of each pipeline (`pipelines.py`, which only vLLM-Omni's processes can import)
TEXT_TO_TEXT = "tiny_text_to_text"
TEXT_TO_SOUND = "tiny_text_to_sound"
TEXT_TO_PICTURE = "tiny_text_to_picture"
BRANCHES = "tiny_branches"
SPEECH_AND_PICTURE = "tiny_speech_and_picture"
STAGES = {TEXT_TO_TEXT: 2, TEXT_TO_SOUND: 3, TEXT_TO_PICTURE: 2, BRANCHES: 4, SPEECH_AND_PICTURE: 4}
# the stages that each stage reads, where they are no line
SOURCES = {BRANCHES: [(), (0,), (0,), (1, 2)], SPEECH_AND_PICTURE: [(), (0,), (1,), (0,)]}
DIFFUSION = {TEXT_TO_PICTURE: 1, SPEECH_AND_PICTURE: 3}  # the stage that is one


@dataclass(frozen=True)
class PipelineSpec:
    """Names a pipeline, its mode, and the connector on all its edges with its `extra`. It travels as JSON.

    ``connector``: "" for a deploy YAML that names none.
    """

    pipeline: str
    mode: Mode
    connector: str = "SharedMemoryConnector"
    extra: Mapping[str, Any] = field(default_factory=dict)
    entrypoint: Literal["AsyncOmni", "Omni"] = "AsyncOmni"
    workers: bool = False  # in processes of their own
    replicas: int = 1  # of one stage
    replicated: int = -1  # that stage; the last one
    scheduling: Mapping[str, Any] | None = None  # options of the stage scheduler; None: vLLM-Omni alone
    max_num_seqs: int = 8
    max_model_len: int = 1024
    kv_cache_bytes: int = 32 << 20  # of each stage

    @property
    def stages(self) -> int:
        """Number of stages."""
        return STAGES[self.pipeline]

    @property
    def edges(self) -> list[tuple[str, str]]:
        """By the names of their stages."""
        return [(str(source), str(stage)) for stage in range(self.stages) for source in self.sources(stage)]

    def sources(self, stage: int) -> tuple[int, ...]:
        """Return the stages that a stage reads."""
        if self.pipeline in SOURCES:
            return SOURCES[self.pipeline][stage]
        return (stage - 1,) if stage else ()

    def to_json(self) -> dict[str, Any]:
        """Return the arguments for `PipelineSpec(**…)`."""
        return asdict(self)

"""Models whose M-RoPE positions can be continued, without weights, and prompts for them made piece by piece."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)

MERGE = 2
VIDEO, START, END = 900_001, 900_002, 900_003
CONFIG = SimpleNamespace(
    vision_config=SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=2.0),
    spatial_conv_size=MERGE,
    temporal_conv_size=2,
    video_token_id=VIDEO,
    vision_start_token_id=START,
    vision_end_token_id=END,
)


@dataclass
class Piece:
    """A stretch of the prompt; an item where it has a modality. `embedded` says which of its tokens are the item's."""

    tokens: list[int]
    modality: str | None = None
    metadata: dict[str, torch.Tensor] | None = None
    embedded: torch.Tensor | None = None

    def feature(self, offset: int, name: str) -> MultiModalFeatureSpec:
        data = {key: _element(value, keep_on_cpu=True) for key, value in (self.metadata or {}).items()}
        data["raw"] = _element(torch.zeros(8), keep_on_cpu=False)
        position = PlaceholderRange(offset=offset, length=len(self.tokens), is_embed=self.embedded)
        return MultiModalFeatureSpec(
            data=MultiModalKwargsItem(data), modality=self.modality, identifier=name, mm_position=position
        )


def _element(data: torch.Tensor, keep_on_cpu: bool) -> MultiModalFieldElem:
    return MultiModalFieldElem(data=data, field=MultiModalBatchedField(keep_on_cpu=keep_on_cpu))


def _grid(rng: random.Random, frames: int, side: int = 4) -> tuple[list[int], int]:
    """Return a grid of patches, and the number of tokens of a frame of it."""
    height, width = rng.randint(1, side), rng.randint(1, side)
    return [frames, height * MERGE, width * MERGE], height * width


def text(rng: random.Random) -> Piece:
    return Piece([rng.randrange(1000) for _ in range(rng.randint(1, 12))])


def image(rng: random.Random) -> Piece:
    grid, tokens = _grid(rng, 1)
    return Piece([7] * tokens, "image", {"image_grid_thw": torch.tensor(grid)})


def video(rng: random.Random) -> Piece:
    grid, tokens = _grid(rng, rng.randint(1, 5))
    return Piece([8] * (tokens * grid[0]), "video", {"video_grid_thw": torch.tensor(grid)})


def timed_video(rng: random.Random) -> Piece:
    piece = video(rng)
    piece.metadata["second_per_grid_ts"] = torch.tensor(rng.choice([0.25, 0.5, 1.0, 1.7, 3.0]))
    return piece


def halved_video(rng: random.Random) -> Piece:
    """Draw a video of which two frames become one in time."""
    grid, tokens = _grid(rng, 2 * rng.randint(1, 3))
    return Piece([8] * (tokens * grid[0] // 2), "video", {"video_grid_thw": torch.tensor(grid)})


def framed_video(rng: random.Random) -> Piece:
    """Return a video in which each frame has a time stamp before it and marks around it, all within the item."""
    grid, per_frame = _grid(rng, rng.randint(1, 4))
    tokens: list[int] = []
    for _ in range(grid[0]):
        tokens += [rng.randrange(1000) for _ in range(rng.randint(0, 3))] + [START, *[VIDEO] * per_frame, END]
    embedded = torch.tensor([token == VIDEO for token in tokens])
    return Piece(tokens, "video", {"video_grid_thw": torch.tensor(grid)}, embedded)


def audio(rng: random.Random) -> Piece:
    """Draw audio of a whole number of seconds: 100 mel frames become 13 tokens."""
    seconds = rng.randint(1, 3)
    return Piece([9] * (13 * seconds), "audio", {"audio_feature_lengths": torch.tensor(100 * seconds)})


MODELS: dict[str, tuple[Callable[[random.Random], Piece], ...]] = {
    "qwen2_vl.Qwen2VLForConditionalGeneration": (text, image, video),
    "qwen2_5_vl.Qwen2_5_VLForConditionalGeneration": (text, image, video, timed_video),
    "qwen3_vl.Qwen3VLForConditionalGeneration": (text, image, framed_video),
    "qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration": (text, image, framed_video),
    "glm4_1v.Glm4vForConditionalGeneration": (text, image, video, framed_video),
    "ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration": (text, image, halved_video),
    "qwen3_asr.Qwen3ASRForConditionalGeneration": (text, audio),
}
"""Model -> what its prompts are made of."""


def model_class(name: str) -> type:
    module, _, cls = name.rpartition(".")
    found: type = getattr(import_module(f"vllm.model_executor.models.{module}"), cls)
    return found


def make_model(name: str) -> Any:
    """Return the model with its configuration alone, which is all that its positions need."""
    model = object.__new__(model_class(name))
    torch.nn.Module.__init__(model)
    model.config = CONFIG
    return model


def updates(rng: random.Random, model: str, number: int) -> Iterator[list[Piece]]:
    """Return the updates of a session."""
    makers = MODELS[model]
    for _ in range(number):
        yield [rng.choice(makers)(rng) for _ in range(rng.randint(1, 4))]

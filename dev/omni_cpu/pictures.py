"""The diffusion stage's model: a diffusion transformer of two layers, which starts from noise, and a decoder of one.

Registered with vLLM-Omni as a model out of its tree; its weights are drawn from one seed, the same in every process.
It is conditioned by what the text stage has said, and by size, steps, guidance and seed of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from vllm_omni.diffusion.attention.layer import Attention
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

PATCH = 16  # pixels, square: what one token of the transformer becomes
LATENTS = 8  # numbers in a token
HIDDEN, HEADS, LAYERS = 64, 4, 2
WORDS = 512  # of the text stage
SIDE, STEPS = 64, 4  # of a request that does not say


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.attention = Attention(HEADS, HIDDEN // HEADS, causal=False, softmax_scale=(HIDDEN // HEADS) ** -0.5)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.before(hidden)).unflatten(-1, (3, HEADS, HIDDEN // HEADS))
        hidden = hidden + self.out(self.attention(*qkv.unbind(2)).flatten(2))
        return hidden + self.mlp(self.between(hidden))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.into = nn.Embedding(WORDS, HIDDEN), nn.Linear(LATENTS, HIDDEN)
        self.time = nn.Linear(2, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.out = nn.Linear(HIDDEN, LATENTS)

    def forward(self, latents: torch.Tensor, words: torch.Tensor, time: float) -> torch.Tensor:
        """Return the velocity at a time between 1 (noise) and 0; words precede the latents in the sequence."""
        places = torch.arange(latents.shape[1])[:, None] / 10 ** torch.linspace(0, 3, HIDDEN)
        text = self.words(words)[None] + torch.arange(len(words))[:, None].cos()
        hidden = torch.cat([text, self.into(latents) + places.sin()], dim=1) + self.time(torch.tensor([time, time**2]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden[:, len(words) :])


class PicturePipeline(nn.Module):
    """Turns text into a picture, one request at a time."""

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = "") -> None:
        super().__init__()
        self.device = torch.device("cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.transformer = Transformer()
            self.decoder = nn.Linear(LATENTS, 3 * PATCH * PATCH)

    def forward(self, req: DiffusionRequestBatch) -> DiffusionOutput:
        params = req.sampling_params
        rows, columns = (params.height or SIDE) // PATCH, (params.width or SIDE) // PATCH
        words, steps = words_of(req.prompts[0]), params.num_inference_steps or STEPS
        latents = torch.randn(1, rows * columns, LATENTS, generator=params.generator)
        for step in range(steps):
            velocity = self.transformer(latents, words, 1 - step / steps)
            latents = latents - velocity * (params.guidance_scale or 1.0) / steps
        pixels = self.decoder(latents).tanh().view(rows, columns, 3, PATCH, PATCH)
        return DiffusionOutput(output=pixels.permute(2, 0, 3, 1, 4).reshape(1, 3, rows * PATCH, columns * PATCH))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in self.named_parameters()}


def words_of(prompt: Any) -> torch.Tensor:
    """Return the text stage's tokens, or the bytes of plain text, such as vLLM-Omni's own dummy request."""
    text = prompt if isinstance(prompt, str) else prompt.get("prompt") or ""
    given: Sequence[int] = () if isinstance(prompt, str) else prompt.get("prompt_token_ids") or ()
    return torch.tensor([*given, *text.encode()]) % WORDS


def to_pictures(od_config: OmniDiffusionConfig) -> Callable[[torch.Tensor], list[Image.Image]]:
    """Return the function that turns outputs of the model into pictures; the engine asks for it once."""

    def pictures(pixels: torch.Tensor) -> list[Image.Image]:
        bytes_ = ((pixels.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)
        return [Image.fromarray(np.ascontiguousarray(each)) for each in bytes_.numpy()]

    return pictures

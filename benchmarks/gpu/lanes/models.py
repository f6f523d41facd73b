"""The two sides: one decode step of a 7B LLM, and a vision tower. Random weights, real shapes, bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, HEADS, KV_HEADS, HEAD, INTERMEDIATE, VOCABULARY = 4096, 32, 8, 128, 14336, 32000


class DecodeLayer(nn.Module):
    """Attention of one new token per request over a KV cache of fixed length, and a gated MLP."""

    def __init__(self, batch: int, context: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.gate_up = nn.Linear(HIDDEN, 2 * INTERMEDIATE, bias=False)
        self.down = nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.register_buffer("keys", torch.randn(batch, KV_HEADS, context, HEAD))
        self.register_buffer("values", torch.randn(batch, KV_HEADS, context, HEAD))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch = hidden.shape[0]
        query, key, value = self.qkv(self.norms[0](hidden)).split([HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD], -1)
        self.keys[:, :, -1] = key.view(batch, KV_HEADS, HEAD)
        self.values[:, :, -1] = value.view(batch, KV_HEADS, HEAD)
        attended = F.scaled_dot_product_attention(
            query.view(batch, HEADS, 1, HEAD), self.keys, self.values, enable_gqa=True
        )
        hidden = hidden + self.out(attended.view(batch, HEADS * HEAD))
        gate, up = self.gate_up(self.norms[1](hidden)).chunk(2, -1)
        return hidden + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Computes one decode step: hidden states of shape (batch, 4096) to token ids of shape (batch,)."""

    def __init__(self, layers: int, batch: int, context: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecodeLayer(batch, context) for _ in range(layers))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden).argmax(-1)


class VisionTower(nn.Module):
    """Encoder like ViT-L/14 at 336 pixels: 24 layers over 576 patches. Called as the work of a lane."""

    def __init__(self, layers: int = 24, hidden: int = 1024, heads: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, kernel_size=14, stride=14)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, heads, 4 * hidden, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.project = nn.Linear(hidden, HIDDEN)

    def forward(self, images: torch.Tensor, pause: Callable[[], None]) -> torch.Tensor:
        """``images`` (n, 3, 336, 336), on the host perhaps; returns embeddings of shape (n, 576, 4096)."""
        weight = self.project.weight
        hidden = self.patches(images.to(weight.device, non_blocking=True)).flatten(2).transpose(1, 2)
        for layer in self.layers:
            pause()
            hidden = layer(hidden)
        return self.project(hidden)

"""Attention of diffusion models: vLLM-Omni's own by PyTorch, which runs only on platforms that it knows by name."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.sdpa import SDPABackend, SDPAImpl


class CpuAttention(SDPAImpl):
    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_metadata: Any = None
    ) -> torch.Tensor:
        return self.forward_cuda(query, key, value, attn_metadata)  # nothing in it is of CUDA


class CpuAttentionBackend(SDPABackend):
    @staticmethod
    def get_impl_cls() -> type[SDPAImpl]:
        return CpuAttention

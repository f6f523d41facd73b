"""Random weights that mean something.

vLLM's own `load_format="dummy"` draws from ±0.001, where neither the context nor an image ever changes the next token;
comparing tokens would then prove nothing. These are scaled so that each layer matters.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def random_weights(named_parameters: Iterable[tuple[str, Any]], *, seed: int) -> dict[str, Any]:
    """Draw the parameters of a transformers model, in the order of their names."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in sorted(named_parameters):
        weight = weight.detach()
        if weight.ndim >= 2:  # keep the variance of what passes through
            inputs = 1 if "embed_tokens" in name or "position_embedding" in name else weight[0].numel()
            weight.normal_(std=inputs**-0.5, generator=generator)
        elif "norm" in name and name.endswith("weight"):
            weight.fill_(1.0)
        else:
            weight.normal_(std=0.1, generator=generator)
        weights[name] = weight.contiguous()
    return weights

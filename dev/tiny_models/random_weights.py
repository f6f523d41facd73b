"""Random weights that mean something.

vLLM's own `load_format="dummy"` draws from ±0.001, where neither the context nor an image ever changes the next token;
comparing tokens would then prove nothing. These are scaled so that each layer matters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
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


def save(model: Any, folder: Path, names_on_disk: Mapping[str, str], *, seed: int) -> None:
    """Write random weights of a transformers model as the one file of a checkpoint.

    Args:
        names_on_disk: the beginning of a parameter's name -> what the checkpoint has in its place.

    Raises:
        ValueError: a parameter begins with none of these.
    """
    from safetensors.torch import save_file

    def on_disk(name: str) -> str:
        for module, there in names_on_disk.items():
            if name.startswith(module):
                return there + name.removeprefix(module)
        raise ValueError(f"no checkpoint name for {name}: transformers has renamed a module of {type(model).__name__}")

    weights = random_weights(model.named_parameters(), seed=seed)
    save_file(
        {on_disk(name): weight for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )

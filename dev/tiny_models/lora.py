"""A LoRA adapter for the language model of the tiny LLaVA, strong enough to change the tokens."""

from __future__ import annotations

import json
from pathlib import Path

from dev.tiny_models.folder import write_once
from dev.tiny_models.llava import SIZES

SEED = 24
RANK = 8


def write_lora(out: Path) -> Path:
    """Write the adapter into `out`, in the format of PEFT."""
    return write_once(out, _write, sources=[__file__], sizes=SIZES)


def _write(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    generator, hidden = torch.Generator().manual_seed(SEED), SIZES["llm_hidden"]
    weights = {}
    for layer in range(SIZES["llm_layers"]):
        for module in ("q_proj", "v_proj"):
            name = f"base_model.model.language_model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * hidden**-0.5
            weights[f"{name}.lora_B.weight"] = torch.randn(hidden, RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))

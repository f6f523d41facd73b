"""A tiny EAGLE draft for the tiny LLaVA: one layer of Mistral, a drafter that reads the embeddings of images.

It has no embeddings of tokens and no head of its own: vLLM lends it those of the LLaVA.
"""

from __future__ import annotations

from pathlib import Path

from dev.tiny_models import random_weights
from dev.tiny_models.folder import write_once
from dev.tiny_models.llava import SIZES
from dev.tiny_models.tokenizer import VOCAB_SIZE

SEED = 23


def write_eagle(out: Path) -> Path:
    """Write the draft into `out`; vLLM takes it as `speculative_config` with method `eagle`."""
    return write_once(out, _write, sources=[__file__, random_weights.__file__], sizes=SIZES)


def _write(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import MistralConfig, MistralForCausalLM

    hidden = SIZES["llm_hidden"]
    config = MistralConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=1,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=SIZES["llm_heads"],
        num_key_value_heads=SIZES["llm_heads"],
        head_dim=hidden // SIZES["llm_heads"],
        max_position_embeddings=SIZES["max_position_embeddings"],
        sliding_window=None,
    )
    config.architectures = ["MistralForCausalLM"]
    config.save_pretrained(folder)
    parameters = dict(MistralForCausalLM(config).named_parameters())
    named = {name: one for name, one in parameters.items() if "embed_tokens" not in name and "lm_head" not in name}
    named["model.fc.weight"] = torch.nn.Parameter(torch.empty(hidden, 2 * hidden))  # of token and hidden state
    weights = random_weights.random_weights(named.items(), seed=SEED)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

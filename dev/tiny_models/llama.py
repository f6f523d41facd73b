"""A tiny Llama with the tokenizer of the tiny LLaVA: text, and whatever a pipeline of vLLM-Omni makes of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dev.tiny_models import random_weights, tokenizer
from dev.tiny_models.folder import write_once

SEED = 21
LAYERS = 2
HIDDEN = 128
HEADS = 4


def write_llama(out: Path, *, layers: int = LAYERS, hidden: int = HIDDEN) -> Path:
    """Write the model into `out`."""
    sources = [__file__, random_weights.__file__, tokenizer.__file__]
    write = partial(_write, layers=layers, hidden=hidden)
    return write_once(out, write, sources=sources, sizes={"layers": layers, "hidden": hidden})


def _write(folder: Path, *, layers: int, hidden: int) -> None:
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    words = tokenizer.readable_tokenizer()
    words.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=tokenizer.VOCAB_SIZE,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=4096,
        tie_word_embeddings=False,  # tied and random, they would only ever repeat the last token
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    weights = random_weights.random_weights(LlamaForCausalLM(config).named_parameters(), seed=SEED)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

"""A tiny LLaVA: CLIP tower, Llama, and a tokenizer whose every id is printable.

The weights are random but real (see `random_weights.py`), and written to disk. One seed, so every process and every
vLLM version gets the same model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dev.tiny_models import random_weights, tokenizer
from dev.tiny_models.folder import write_once
from dev.tiny_models.tokenizer import VOCAB_SIZE

SEED = 20

SIZES: dict[str, int] = {
    "image_size": 56,
    "patch_size": 14,
    "tower_layers": 3,
    "tower_hidden": 64,
    "tower_heads": 4,
    "llm_layers": 2,
    "llm_hidden": 128,
    "llm_heads": 4,
    "llm_kv_heads": 0,
    "llm_intermediate": 0,
    "max_position_embeddings": 131_072,
}
"""Sizes of the model. 0: as many KV heads as heads, and twice the hidden size between the two halves of an MLP."""

# One image takes 0.2 to 0.4 s on two cores: long enough to see what an encode does to the requests beside it.
SLOW_TOWER: dict[str, int] = {"image_size": 336, "tower_layers": 12, "tower_hidden": 384, "tower_heads": 6}

# The layers of InternViT-6B and of Llama-3-8B, with the small vocabulary: 1,024 patches a picture, 26 GB in bfloat16.
GPU_SIZES: dict[str, int] = {
    "image_size": 448,
    "tower_layers": 45,
    "tower_hidden": 3200,
    "tower_heads": 25,
    "llm_layers": 32,
    "llm_hidden": 4096,
    "llm_heads": 32,
    "llm_kv_heads": 8,
    "llm_intermediate": 14_336,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def write_llava(out: Path, *, weights: bool = True, **sizes: int) -> Path:
    """Write the model into `out`; `sizes` override entries of `SIZES`.

    One image costs (image_size / patch_size)² tokens. Without ``weights`` an engine must make them up
    (``load_format="dummy"``).
    """
    if unknown := sizes.keys() - SIZES.keys():
        raise TypeError(f"unknown size {sorted(unknown)[0]!r}; there are {', '.join(SIZES)}")
    chosen = SIZES | sizes
    sources = [__file__, random_weights.__file__, tokenizer.__file__]
    recipe = {**chosen, "weights": weights}
    return write_once(out, lambda folder: _write(folder, chosen, weights), sources=sources, sizes=recipe)


def _write(folder: Path, sizes: dict[str, int], weights: bool) -> None:
    words = tokenizer.readable_tokenizer()
    words.chat_template = CHAT_TEMPLATE
    words.save_pretrained(folder)
    config = _config(words, sizes)
    config.save_pretrained(folder)
    if weights:
        _save_weights(folder, config)
    side = sizes["image_size"]
    image_processor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": sizes["patch_size"],
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor, indent=2))
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2))


def _config(words: Any, sizes: dict[str, int]) -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            image_size=sizes["image_size"],
            patch_size=sizes["patch_size"],
            num_hidden_layers=sizes["tower_layers"],
            hidden_size=sizes["tower_hidden"],
            intermediate_size=4 * sizes["tower_hidden"],
            num_attention_heads=sizes["tower_heads"],
            projection_dim=sizes["tower_hidden"],
        ),
        text_config=LlamaConfig(
            vocab_size=VOCAB_SIZE,
            num_hidden_layers=sizes["llm_layers"],
            hidden_size=sizes["llm_hidden"],
            intermediate_size=sizes["llm_intermediate"] or 2 * sizes["llm_hidden"],
            num_attention_heads=sizes["llm_heads"],
            num_key_value_heads=sizes["llm_kv_heads"] or sizes["llm_heads"],
            max_position_embeddings=sizes["max_position_embeddings"],
            bos_token_id=words.bos_token_id,
            eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id,
        ),
        image_token_index=words.convert_tokens_to_ids("<image>"),
        image_seq_length=(sizes["image_size"] // sizes["patch_size"]) ** 2,
        vision_feature_select_strategy="default",
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    return config


def _save_weights(folder: Path, config: Any) -> None:
    from safetensors.torch import save_file
    from transformers import LlavaForConditionalGeneration

    weights = random_weights.random_weights(LlavaForConditionalGeneration(config).named_parameters(), seed=SEED)
    weights = {_name_in_checkpoint(name): weight for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _name_in_checkpoint(name: str) -> str:
    """LLaVA's names on disk, which every vLLM reads; transformers renames its modules between releases."""
    for module, on_disk in (
        ("model.vision_tower.", "vision_tower.vision_model."),
        ("model.language_model.", "language_model.model."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("lm_head.", "language_model.lm_head."),
    ):
        if name.startswith(module):
            return on_disk + name.removeprefix(module).removeprefix("vision_model.")
    raise ValueError(f"no checkpoint name for {name}: transformers has renamed a module of LLaVA")

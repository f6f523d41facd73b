"""Folders that stand in for the two hub models that vLLM's scheduler tests name.

The tests only read configuration, tokenizer and processor; run from a folder that holds these, the names resolve to
them and no hub is asked. There are no weights.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<image>")

OPT_CONFIG: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "ffn_dim": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "word_embed_proj_dim": 64,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float16",
}

# Image size and sequence length are those of the real model: tests count its 576 tokens per image.
LLAVA_CONFIG: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": SPECIAL_TOKENS.index("<image>"),
    "image_seq_length": 576,
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "torch_dtype": "float16",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "torch_dtype": "float16",
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 64,
        "intermediate_size": 128,
        "image_size": 336,
        "patch_size": 14,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "projection_dim": 64,
        "vocab_size": VOCAB_SIZE,
    },
}

IMAGE_PROCESSOR: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 336},
    "do_center_crop": True,
    "crop_size": {"height": 336, "width": 336},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "do_convert_rgb": True,
    "resample": 3,
}

PROCESSOR: dict[str, Any] = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "patch_size": 14,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}


def write_models(out: Path) -> Path:
    """Write both folders below `out` and return `out`."""
    opt = out / "facebook" / "opt-125m"
    llava = out / "llava-hf" / "llava-1.5-7b-hf"
    for folder, config in ((opt, OPT_CONFIG), (llava, LLAVA_CONFIG)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
        (folder / "tokenizer_config.json").write_text(json.dumps(_tokenizer_config()))
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    (llava / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR, indent=2))
    (llava / "processor_config.json").write_text(json.dumps(PROCESSOR, indent=2))
    return out


def _tokenizer() -> dict[str, Any]:
    characters = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    tokens = [*SPECIAL_TOKENS, *characters]
    tokens += [f"word{i}" for i in range(VOCAB_SIZE - len(tokens))]
    added = [
        {
            "id": i,
            "content": t,
            "special": True,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
        for i, t in enumerate(SPECIAL_TOKENS)
    ]
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": [], "unk_token": "<unk>"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return {"version": "1.0", **parts, "added_tokens": added, "model": model, "decoder": {"type": "Fuse"}}


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "additional_special_tokens": ["<image>"],
        "model_max_length": 4096,
    }

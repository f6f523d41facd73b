"""Local stand-ins for the hub models that vLLM's own scheduler tests name.

The tests build a `ModelConfig` for `facebook/opt-125m` or `llava-hf/llava-1.5-7b-hf` but never load a weight. A folder of that
relative name below the working directory is all the name needs to resolve to, so configuration and tokenizer files are enough
and no hub is asked. What the tests rely on is as published (context lengths, 336-pixel LLaVA images of 576 tokens, M-RoPE of
Qwen2.5-VL); layers and widths are small.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "<image>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
ID_OF = {token: index for index, token in enumerate(SPECIAL_TOKENS)}

OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "dtype": "float16",
}

LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": ID_OF["<image>"],
    "image_seq_length": 576,
    "pad_token_id": ID_OF["<pad>"],
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "dtype": "float16",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "vocab_size": 32064,
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
    },
}

QWEN2_5_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "bos_token_id": ID_OF["<s>"],
    "eos_token_id": ID_OF["</s>"],
    "vision_start_token_id": ID_OF["<|vision_start|>"],
    "vision_end_token_id": ID_OF["<|vision_end|>"],
    "image_token_id": ID_OF["<|image_pad|>"],
    "video_token_id": ID_OF["<|video_pad|>"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128_000,
    "vocab_size": 151_936,
    "rope_theta": 1_000_000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "dtype": "float16",
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 128,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_chans": 3,
        "window_size": 112,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    },
}

_NORMALIZE = {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_rescale": True}
_QWEN_PIXELS = {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}

MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "facebook/opt-125m": {"config.json": OPT},
    "facebook/opt-350m": {"config.json": OPT},
    "llava-hf/llava-1.5-7b-hf": {
        "config.json": LLAVA,
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            "do_resize": True,
            "do_center_crop": True,
            "do_convert_rgb": True,
            **_NORMALIZE,
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "image_token": "<image>",
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    },
    "Qwen/Qwen2.5-VL-3B-Instruct": {
        "config.json": QWEN2_5_VL,
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
            **_QWEN_PIXELS,
            **_NORMALIZE,
        },
        "video_preprocessor_config.json": {
            "video_processor_type": "Qwen2VLVideoProcessor",
            **_QWEN_PIXELS,
            **_NORMALIZE,
        },
    },
}


def write_models(root: Path) -> None:
    """Write every model folder below `root`."""
    for name, files in MODELS.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        _write_tokenizer(folder)
        for file_name, content in files.items():
            (folder / file_name).write_text(json.dumps(content, indent=1))


def _write_tokenizer(folder: Path) -> None:
    """One token per byte, and the special tokens that the models name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)

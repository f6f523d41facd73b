"""Local stand-ins for the hub models that vLLM's own tests name.

A folder of that relative name below the working directory is all the name needs to resolve to, and no hub is asked. The
tests never load a weight, so configuration and tokenizer files are enough.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from patches import models as opt_and_llava

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", *VISION_TOKENS)
ID_OF = {token: index for index, token in enumerate(SPECIAL_TOKENS)}

# M-RoPE, context length and image sizes are those of the real model; layers and widths are small.
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

# Linear attention in three layers of four, as in the real model, and a layer that predicts a further token.
QWEN3_NEXT: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "bos_token_id": ID_OF["<s>"],
    "eos_token_id": ID_OF["</s>"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 4096,
    "vocab_size": 512,
    "dtype": "float16",
}

PIXELS: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "do_normalize": True,
    "do_rescale": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def write_models(root: Path) -> None:
    """Write every model folder below `root`."""
    opt_and_llava.write_models(root)
    shutil.copytree(root / "facebook" / "opt-125m", root / "facebook" / "opt-350m", dirs_exist_ok=True)
    qwen = root / "Qwen" / "Qwen2.5-VL-3B-Instruct"
    qwen.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(qwen)
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", **PIXELS}
    video = {"video_processor_type": "Qwen2VLVideoProcessor", **PIXELS}
    (qwen / "config.json").write_text(json.dumps(QWEN2_5_VL, indent=1))
    (qwen / "preprocessor_config.json").write_text(json.dumps(image, indent=1))
    (qwen / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1))
    qwen_next = root / "Qwen" / "Qwen3-Next-80B-A3B-Instruct"
    qwen_next.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(qwen_next)
    (qwen_next / "config.json").write_text(json.dumps(QWEN3_NEXT, indent=1))


def _write_tokenizer(folder: Path) -> None:
    """One token per byte, and the special tokens that the model names."""
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

"""A tiny Qwen3-VL: like the tiny Qwen2-VL, with the video processor of Qwen3-VL, which bounds the pixels of all frames.

Frames of a short video are scaled to at most 96x96 pixels: two of them make nine tokens at most.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dev.tiny_models import qwen2_vl, random_weights
from dev.tiny_models.qwen2_vl import HEADS, HIDDEN, LAYERS

SEED = 29
PATCH = 16
MOST_FRAMES = 16
SIDE = 96


def write_qwen3_vl(out: Path) -> Path:
    """Write the model into `out`."""
    return qwen2_vl.write_family(out, __file__, _config, _save_weights, write_processors)


def write_processors(folder: Path) -> None:
    """Write the configuration of the HF processors of the tiny Qwen3-VL."""
    least = (2 * PATCH) ** 2
    vision = {
        "processor_class": "Qwen3VLProcessor",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "do_convert_rgb": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": least, "longest_edge": SIDE**2},
        **vision,
    }
    video = {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": 2 * least, "longest_edge": MOST_FRAMES * SIDE**2},
        "do_sample_frames": False,
        **vision,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))


def _config(words: Any) -> Any:
    from transformers import Qwen3VLConfig

    text = qwen2_vl.text_config(words)
    text["rope_parameters"] |= {"mrope_interleaved": True}
    config = Qwen3VLConfig(
        vision_config={
            "depth": LAYERS,
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": HIDDEN,
            "num_heads": HEADS,
            "patch_size": PATCH,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0],
        },
        text_config={**text, "head_dim": HIDDEN // HEADS},
        **qwen2_vl.token_ids(words),
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    return config


NAMES_ON_DISK = {name: name for name in ("model.", "lm_head.")}
"""Parameters have the names of Qwen3-VL's checkpoints."""


def _save_weights(folder: Path, config: Any) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    random_weights.save(Qwen3VLForConditionalGeneration(config), folder, NAMES_ON_DISK, seed=SEED)

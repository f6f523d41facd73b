"""A tiny Qwen2.5-VL: like the tiny Qwen2-VL, and vLLM can prune its videos (`--video-pruning-rate`).

A frame is scaled to at most 112x112 pixels: two frames make sixteen tokens at most, of which pruning leaves some.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from dev.tiny_models import qwen2_vl, random_weights
from dev.tiny_models.qwen2_vl import HEADS, HIDDEN, LAYERS, NAMES_ON_DISK, PATCH

SEED = 27
SIDE = 112


def write_qwen2_5_vl(out: Path) -> Path:
    """Write the model into `out`."""
    processors = partial(qwen2_vl.write_processors, name="Qwen2_5_VLProcessor", side=SIDE)
    return qwen2_vl.write_family(out, __file__, _config, _save_weights, processors)


def _config(words: Any) -> Any:
    from transformers import Qwen2_5_VLConfig

    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": LAYERS,
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": HIDDEN,
            "num_heads": HEADS,
            "patch_size": PATCH,
            "window_size": 4 * PATCH,
            "fullatt_block_indexes": [LAYERS - 1],
        },
        text_config=qwen2_vl.text_config(words),
        **qwen2_vl.token_ids(words),
        tie_word_embeddings=False,
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    return config


def _save_weights(folder: Path, config: Any) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    random_weights.save(Qwen2_5_VLForConditionalGeneration(config), folder, NAMES_ON_DISK, seed=SEED)

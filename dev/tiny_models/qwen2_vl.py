"""A tiny Qwen2-VL: it takes videos, and its processor has a video loader of its own in vLLM.

A frame is scaled to at most 56x56 pixels, so that a video costs its decoding and little else: two frames make four
tokens at most.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dev.tiny_models import random_weights, tokenizer
from dev.tiny_models.folder import write_once
from dev.tiny_models.tokenizer import VOCAB_SIZE

SEED = 22
PATCH = 14
SIDE = 56
LAYERS = 2
HIDDEN = 128
HEADS = 4
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}assistant:"
)


def write_qwen2_vl(out: Path) -> Path:
    """Write the model into `out`."""
    processors = partial(write_processors, name="Qwen2VLProcessor", side=SIDE)
    return write_family(out, __file__, _config, _save_weights, processors)


def write_family(
    out: Path,
    source: str,
    config_of: Callable[[Any], Any],
    save_weights: Callable[[Path, Any], None],
    write_processors: Callable[[Path], None],
) -> Path:
    """Write a tiny model of the family of Qwen2-VL into `out`, of parts that these functions make.

    Args:
        source: file of these functions; when it changes, the model is written again.
        config_of: returns the configuration for a tokenizer.
    """

    def write(folder: Path) -> None:
        config = config_of(write_tokenizer(folder))
        config.save_pretrained(folder)
        save_weights(folder, config)
        write_processors(folder)

    sources = [source, __file__, random_weights.__file__, tokenizer.__file__]
    return write_once(out, write, sources=sources, sizes={})


def write_tokenizer(folder: Path) -> Any:
    """Write the tokenizer of a tiny Qwen-VL into a folder, and return it."""
    words = tokenizer.readable_tokenizer((*tokenizer.SPECIAL_TOKENS[:4], *VISION_TOKENS))
    words.chat_template = CHAT_TEMPLATE
    words.save_pretrained(folder)
    return words


def write_processors(folder: Path, name: str, side: int) -> None:
    """Write the configuration of the HF processor `name`, which scales a frame to at most `side` pixels each way."""
    vision = {
        "size": {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": side**2},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "do_convert_rgb": True,
    }
    image = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": name, **vision}
    video = {"video_processor_type": "Qwen2VLVideoProcessor", "processor_class": name, **vision}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=2))


def token_ids(words: Any) -> dict[str, int]:
    """Return the ids of the tokens that stand for pictures and videos, as a configuration names them."""
    ids = {token: words.convert_tokens_to_ids(token) for token in VISION_TOKENS}
    return {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }


def text_config(words: Any) -> dict[str, Any]:
    """Return the configuration of the language model."""
    return {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 32_768,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        # rotary halves of a head of 32: time, height, width
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
    }


def _config(words: Any) -> Any:
    from transformers import Qwen2VLConfig

    config = Qwen2VLConfig(
        vision_config={
            "depth": LAYERS,
            "embed_dim": 64,
            "hidden_size": HIDDEN,
            "num_heads": HEADS,
            "mlp_ratio": 2,
            "patch_size": PATCH,
        },
        text_config=text_config(words),
        **token_ids(words),
        tie_word_embeddings=False,  # tied and random, they would only ever repeat the last token
    )
    config.architectures = ["Qwen2VLForConditionalGeneration"]
    return config


NAMES_ON_DISK = {
    "model.visual.": "visual.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""The beginning of a parameter's name -> that in Qwen2-VL's checkpoints, which every vLLM reads."""


def _save_weights(folder: Path, config: Any) -> None:
    from transformers import Qwen2VLForConditionalGeneration

    random_weights.save(Qwen2VLForConditionalGeneration(config), folder, NAMES_ON_DISK, seed=SEED)

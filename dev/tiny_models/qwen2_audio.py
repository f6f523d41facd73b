"""A tiny Qwen2-Audio: it takes clips of sound, each as one item of a plain request.

A clip costs one token for each 40 ms, whatever its encoder computes: that always takes 30 s of sound.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dev.tiny_models import random_weights, tokenizer
from dev.tiny_models.folder import write_once
from dev.tiny_models.tokenizer import VOCAB_SIZE

SEED = 25
LAYERS = 2
HIDDEN = 128
HEADS = 4
AUDIO_TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")


def write_qwen2_audio(out: Path) -> Path:
    """Write the model into `out`."""
    return write_once(out, _write, sources=[__file__, random_weights.__file__, tokenizer.__file__], sizes={})


def _write(folder: Path) -> None:
    words = tokenizer.readable_tokenizer((*tokenizer.SPECIAL_TOKENS[:4], *AUDIO_TOKENS))
    words.save_pretrained(folder)
    config = _config(words)
    config.save_pretrained(folder)
    _save_weights(folder, config)
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen2AudioProcessor",
        "feature_size": 128,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "n_samples": 480_000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
    }
    processor = {
        "processor_class": "Qwen2AudioProcessor",
        **dict(zip(("audio_token", "audio_bos_token", "audio_eos_token"), AUDIO_TOKENS, strict=True)),
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(features, indent=2))
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2))


def _config(words: Any) -> Any:
    from transformers import Qwen2AudioConfig

    config = Qwen2AudioConfig(
        audio_config={
            "d_model": 64,
            "encoder_layers": LAYERS,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "num_mel_bins": 128,
        },
        text_config={
            "model_type": "qwen2",
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
            "tie_word_embeddings": False,  # tied and random, they would only ever repeat the last token
        },
        audio_token_index=words.convert_tokens_to_ids(AUDIO_TOKENS[0]),
    )
    config.architectures = ["Qwen2AudioForConditionalGeneration"]
    return config


NAMES_ON_DISK = {
    "model.audio_tower.": "audio_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
}
"""The beginning of a parameter's name -> that in Qwen2-Audio's checkpoints, which every vLLM reads."""


def _save_weights(folder: Path, config: Any) -> None:
    from transformers import Qwen2AudioForConditionalGeneration

    random_weights.save(Qwen2AudioForConditionalGeneration(config), folder, NAMES_ON_DISK, seed=SEED)

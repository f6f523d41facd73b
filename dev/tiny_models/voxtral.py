"""A tiny VoxtralRealtime: causal audio encoder and LLM of two layers each, in Mistral's own file format.

Load it with `tokenizer_mode="mistral"`, `config_format="mistral"` and `load_format="mistral"`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dev.tiny_models import voxtral_weights
from dev.tiny_models.folder import write_once

VOCAB_SIZE = 512
NUM_SPECIAL_TOKENS = 64
MAX_POSITION_EMBEDDINGS = 65_536

AUDIO = {"sampling_rate": 16_000, "frame_rate": 12.5}
MEL = {"num_mel_bins": 128, "hop_length": 160, "window_size": 400}
AUDIO_TOKENS = ("[AUDIO]", "[BEGIN_AUDIO]", "[TRANSCRIBE]", "[STREAMING_PAD]", "[STREAMING_WORD]")
# mistral_common's v13 tokenizer looks these up when it is built
INSTRUCT_TOKENS = ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")


def write_voxtral_realtime(out: Path) -> Path:
    """Write the model into `out`. One frame of audio is 80 ms, 1,280 samples, and costs one token."""
    return write_once(out, _write, sources=[__file__, voxtral_weights.__file__], sizes={})


def _write(folder: Path) -> None:
    params = _params()
    (folder / "tekken.json").write_text(json.dumps(_tekken()))
    (folder / "params.json").write_text(json.dumps(params, indent=2))
    voxtral_weights.save(folder / "consolidated.safetensors", params)


def _tekken() -> dict[str, Any]:
    """mistral_common's own tokenizer, cut to a small vocabulary, with what a streaming audio model asks of it."""
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    data = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    tekken: dict[str, Any] = json.loads(data.read_text())

    names = [str(token["token_str"]) for token in Tekkenizer.DEPRECATED_SPECIAL_TOKENS]
    names += [name for name in (*AUDIO_TOKENS, *INSTRUCT_TOKENS) if name not in names]
    names += [f"<SPECIAL_{rank}>" for rank in range(len(names), NUM_SPECIAL_TOKENS)]
    tekken["special_tokens"] = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
    ]
    tekken["vocab"] = tekken["vocab"][: VOCAB_SIZE - NUM_SPECIAL_TOKENS]
    tekken["config"].update(
        default_vocab_size=VOCAB_SIZE,
        default_num_special_tokens=NUM_SPECIAL_TOKENS,
        num_vocab_tokens=VOCAB_SIZE - NUM_SPECIAL_TOKENS,
        version="v13",
    )
    for other_modality in ("image", "multimodal"):
        tekken.pop(other_modality, None)
    tekken["audio"] = {
        **AUDIO,
        "audio_encoding_config": MEL,
        "transcription_format": "streaming",
        "transcription_delay_ms": 480,
        "streaming_look_ahead_ms": 2.5,
        "streaming_look_back_ms": 52.5,
        "streaming_n_left_pad_tokens": 32,
    }
    return tekken


def _params() -> dict[str, Any]:
    encoder = {
        "audio_encoding_args": {
            **AUDIO,
            **MEL,
            "chunk_length_s": None,
            "global_log_mel_max": 1.5,
            "transcription_format": "streaming",
        },
        "dim": 64,
        "n_layers": 2,
        "head_dim": 32,
        "hidden_dim": 128,
        "n_heads": 2,
        "n_kv_heads": 2,
        "vocab_size": VOCAB_SIZE,
        "use_biases": True,
        "use_cache": False,
        "causal": True,
        "pos_embed": "rope",
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "norm_type": "rms_norm",
        "ffn_type": "swiglu",
        "max_source_positions": None,
        "sliding_window": 512,
    }
    return {
        "dim": 128,
        "n_layers": 2,
        "head_dim": 32,
        "hidden_dim": 256,
        "n_heads": 4,
        "n_kv_heads": 4,
        "vocab_size": VOCAB_SIZE,
        "use_biases": False,
        "causal": True,
        "rope_theta": 1e6,
        "norm_eps": 1e-5,
        "model_parallel": 1,
        "tied_embeddings": False,  # tied and random, they would only ever repeat the last token
        "sliding_window": None,
        "model_max_length": MAX_POSITION_EMBEDDINGS,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "ada_rms_norm_t_cond": True,
        "ada_rms_norm_t_cond_dim": 32,
        "multimodal": {
            "whisper_model_args": {"encoder_args": encoder, "downsample_args": {"downsample_factor": 4}},
        },
    }

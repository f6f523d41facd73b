"""Random weights of the tiny VoxtralRealtime, under the names Mistral gives them on disk.

Scaled like those of the tiny LLaVA, for the same reason: every frame of audio and every token of the context shall
matter to what comes next. vLLM refuses a file that misses a weight, so a name that changes is noticed at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

SEED = 12
EMBEDDED = "mm_streams_embeddings.embedding_module."
ENCODER = EMBEDDED + "whisper_encoder."
CONVOLUTION_WIDTH = 3


def save(file: Path, params: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, shape in _shapes(params):
        if len(shape) > 1:  # keep the variance of what passes through
            inputs = 1 if "tok_embeddings" in name else shape[1:].numel()
            weights[name] = torch.randn(shape, generator=generator) * inputs**-0.5
        elif "norm" in name:
            weights[name] = torch.ones(shape)
        else:
            weights[name] = torch.randn(shape, generator=generator) * 0.1
    # a spectrogram is mostly its own mean: hear what differs from it
    first = weights[ENCODER + "conv_layers.0.conv.weight"]
    first -= first.mean((1, 2), keepdim=True)
    save_file(weights, file)


def _shapes(params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    import torch

    whisper = params["multimodal"]["whisper_model_args"]
    encoder = whisper["encoder_args"]
    dim, encoder_dim = params["dim"], encoder["dim"]
    joined_dim = encoder_dim * whisper["downsample_args"]["downsample_factor"]
    named = [
        (EMBEDDED + "tok_embeddings.weight", [params["vocab_size"], dim]),
        ("output.weight", [params["vocab_size"], dim]),
        *_language_model(params),
        *_audio_encoder(encoder),
        (EMBEDDED + "audio_language_projection.0.weight", [dim, joined_dim]),
        (EMBEDDED + "audio_language_projection.2.weight", [dim, dim]),
    ]
    return ((name, torch.Size(shape)) for name, shape in named)


def _language_model(params: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    dim, condition_dim = params["dim"], params["ada_rms_norm_t_cond_dim"]
    for number in range(params["n_layers"]):
        layer = f"layers.{number}."
        yield from _transformer_layer(layer, params, biased=())
        yield layer + "ada_rms_norm_t_cond.0.weight", [condition_dim, dim]
        yield layer + "ada_rms_norm_t_cond.2.weight", [dim, condition_dim]
    yield "norm.weight", [dim]


def _audio_encoder(params: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
    dim = params["dim"]
    for number, inputs in enumerate((params["audio_encoding_args"]["num_mel_bins"], dim)):
        yield ENCODER + f"conv_layers.{number}.conv.weight", [dim, inputs, CONVOLUTION_WIDTH]
        yield ENCODER + f"conv_layers.{number}.conv.bias", [dim]
    for number in range(params["n_layers"]):
        yield from _transformer_layer(
            ENCODER + f"transformer.layers.{number}.",
            params,
            biased=("attention.wq", "attention.wv", "attention.wo", "feed_forward.w2"),
        )
    yield ENCODER + "transformer.norm.weight", [dim]


def _transformer_layer(
    layer: str, params: dict[str, Any], *, biased: tuple[str, ...]
) -> Iterator[tuple[str, list[int]]]:
    dim, hidden_dim = params["dim"], params["hidden_dim"]
    queries, keys = params["n_heads"] * params["head_dim"], params["n_kv_heads"] * params["head_dim"]
    matrices = {
        "attention.wq": [queries, dim],
        "attention.wk": [keys, dim],
        "attention.wv": [keys, dim],
        "attention.wo": [dim, queries],
        "feed_forward.w1": [hidden_dim, dim],
        "feed_forward.w2": [dim, hidden_dim],
        "feed_forward.w3": [hidden_dim, dim],
    }
    for name, shape in matrices.items():
        yield f"{layer}{name}.weight", shape
        if name in biased:
            yield f"{layer}{name}.bias", shape[:1]
    yield layer + "attention_norm.weight", [dim]
    yield layer + "ffn_norm.weight", [dim]

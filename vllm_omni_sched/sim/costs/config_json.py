"""Read the shape of a model from its ``config.json``, as Transformers writes it.

Understood are decoders with grouped-query attention or with DeepSeek's latent attention (MLA), dense or with routed
experts, with sliding windows, with the vision towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, CLIP and SigLIP, or text alone.
What is not understood is refused by name: costs of a wrong shape would look as good as those of a right one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.base import Source, SourceKind
from vllm_omni_sched.sim.costs.models import (
    PIXEL_SECONDS,
    Encoding,
    LargestItem,
    ModelShape,
    Precision,
    TowerShape,
    WeightFormat,
    fixed,
    no_items,
    qwen25_vl,
)

_GEMMA3 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
    "tie_word_embeddings": True,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "qwen2": {"attention_bias": True},
    "qwen2_moe": {"attention_bias": True},
    "qwen2_vl": {"attention_bias": True},
    "qwen2_5_vl": {"attention_bias": True},
    "qwen2_5_vl_text": {"attention_bias": True},
    "qwen2_vl_text": {"attention_bias": True},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16},
}
"""Values that Transformers takes for a ``model_type`` if the file leaves them out, as published files do."""

_UNKNOWN = ("state_size", "mamba_d_state", "ssm_cfg", "linear_num_key_heads", "rwkv_hidden_size", "is_encoder_decoder")
"""Fields of models that are no decoders with attention in all layers."""
_INT4 = ("awq", "gptq", "auto-round", "autoround")


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's attention: keys and values of a token are one latent vector, which all heads share.

    ``query_rank``: 0 if queries are not compressed. ``nope``, ``rope``, ``value``: widths of a head, without and with
    positions, and of a value.
    """

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class Experts:
    """Routed experts: ``number`` of width ``ffn`` in each of ``layers``, of which a token goes through ``chosen``.

    ``shared_ffn``: width of what every token goes through beside them.
    """

    layers: int
    number: int
    chosen: int
    ffn: int
    shared_ffn: int = 0


@dataclass(frozen=True)
class ConfiguredLlm:
    """A decoder as its ``config.json`` has it; an `Llm`.

    ``sliding_layers``: layers that see a ``window`` of tokens alone. ``window_share``: the fraction of a context that
    their KV cache holds; 1 until `with_context` is told how long contexts are.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    attention_bias: bool = False
    norms: int = 2
    query_norm: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    sliding_layers: int = 0
    window: int = 0
    window_share: float = 1.0

    @property
    def _attention(self) -> int:
        hidden, latent = self.hidden, self.latent
        if latent is not None:
            width = self.heads * (latent.nope + latent.rope)
            queries = latent.query_rank * (hidden + width + 1) if latent.query_rank else hidden * width
            keys = hidden * (latent.kv_rank + latent.rope) + latent.kv_rank
            values = latent.kv_rank * self.heads * (latent.nope + latent.value)
            return queries + keys + values + self.heads * latent.value * hidden
        query, keys = self.heads * self.head_dim, 2 * self.kv_heads * self.head_dim
        bias = query + keys if self.attention_bias else 0
        return hidden * (2 * query + keys) + bias + (2 * self.head_dim if self.query_norm else 0)

    @property
    def _outside_experts(self) -> int:
        dense = self.layers - (self.experts.layers if self.experts is not None else 0)
        found = self.layers * (self._attention + self.norms * self.hidden) + self.hidden
        found += dense * 3 * self.hidden * self.ffn
        if self.experts is not None:
            each = self.hidden * (self.experts.number + 3 * self.experts.shared_ffn)
            found += self.experts.layers * each
        return found

    @property
    def expert_parameters(self) -> int:
        """Return the parameters of all routed experts."""
        one = self.experts
        return 0 if one is None else one.layers * one.number * 3 * self.hidden * one.ffn

    @property
    def expert_share(self) -> float:
        """Return the fraction of the routed experts that a token goes through."""
        return 0.0 if self.experts is None else self.experts.chosen / self.experts.number

    @property
    def layer_parameters(self) -> int:
        """Return the parameters of all layers by which each token is multiplied."""
        return self._outside_experts + round(self.expert_parameters * self.expert_share)

    @property
    def stored_parameters(self) -> int:
        """Return the parameters of all layers."""
        return self._outside_experts + self.expert_parameters

    @property
    def head_parameters(self) -> int:
        """Return the parameters of the output matrix, by which each sampled token is multiplied."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Return the number of all parameters."""
        return self.stored_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Return the parameters that one token goes through, with embedding and output matrix."""
        return self.layer_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def _full_layers(self) -> float:
        """Return the layers with full attention that need as much as all layers do."""
        return self.layers - self.sliding_layers * (1.0 - self.window_share)

    @property
    def operations_per_pair(self) -> int:
        """Return the operations of attention for one query and one key in all layers, for score and value."""
        if self.latent is not None:
            return 2 * self.layers * self.heads * (self.latent.nope + self.latent.rope + self.latent.value)
        return round(4 * self._full_layers * self.heads * self.head_dim)

    @property
    def operations_per_read(self) -> float:
        """Return the operations for a pair of a decoding request, relative to a prompt's.

        With latent attention it works on the latent vectors themselves, whose products are wider.
        """
        if self.latent is None:
            return 1.0
        decode = 2 * self.layers * self.heads * (2 * self.latent.kv_rank + self.latent.rope)
        return decode / self.operations_per_pair

    def kv_numbers_per_token(self, tensor_parallel: int = 1) -> float:
        """Return the numbers in the KV cache of a token on all devices together; each has the whole latent vector."""
        if self.latent is not None:
            return float(self.layers * (self.latent.kv_rank + self.latent.rope) * tensor_parallel)
        return 2 * self._full_layers * max(self.kv_heads, tensor_parallel) * self.head_dim

    def with_context(self, tokens: float) -> ConfiguredLlm:
        """Return the decoder for contexts of so many tokens on average, of which windows hold a part."""
        if not self.sliding_layers or tokens <= self.window:
            return self
        return replace(self, window_share=self.window / tokens)


def read_config(path: Path, name: str = "") -> ModelShape:
    """Return the shape of the model whose ``config.json`` this is, or lies in this folder.

    Args:
        name: of the model, for messages and commands; default: what the file says, or its folder.

    Raises:
        ConfigError: the file cannot be read, lacks a field, or is of a model whose costs are not known; the message
            names file and field.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: a config.json is an object with the fields of a model")
    return shape_of(found, name or str(found.get("_name_or_path") or "") or file.resolve().parent.name, str(file))


def shape_of(config: Mapping[str, Any], name: str, where: str = "config.json") -> ModelShape:
    """Return the shape of a model from the fields of its ``config.json``.

    Raises:
        ConfigError: a field is missing, or the model is of a kind whose costs are not known.
    """
    inner = config.get("text_config") or config.get("llm_config") or config.get("thinker_config")
    text = _Fields({**{key: config[key] for key in ("tie_word_embeddings",) if key in config}, **inner}
                   if isinstance(inner, Mapping) else config, where)  # fmt: skip
    llm = _llm(text)
    vision = config.get("vision_config")
    encodings: dict[str, Encoding] = {}
    largest: LargestItem = no_items
    if isinstance(vision, Mapping) and vision:
        encodings, largest = _vision(_Fields(vision, f"{where}, vision_config"), config, llm.hidden)
    return ModelShape(
        name,
        llm,
        encodings,
        0,
        Source(SourceKind.PUBLISHED, f"{where} of {name}"),
        text.number("max_position_embeddings", 32_768),
        largest,
        _precision(config, where),
    )


class _Fields:
    """Fields of a table of a ``config.json``, with the defaults of its ``model_type``."""

    def __init__(self, table: Mapping[str, Any], where: str) -> None:
        self._table = {**_DEFAULTS.get(str(table.get("model_type")), {}), **table}
        self.where = where

    def has(self, name: str) -> bool:
        return self._table.get(name) is not None

    def get(self, name: str) -> Any:
        return self._table.get(name)

    def number(self, name: str, default: int | None = None) -> int:
        """Return a whole number, 0 or more.

        Raises:
            ConfigError: it is missing and has no default, or is no such number.
        """
        value = self._table.get(name)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.where}: the field {name!r} is missing, and the costs need it")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self.where}: the field {name!r} must be a whole number of 0 or more, got {value!r}")
        return value


def _llm(text: _Fields) -> ConfiguredLlm:
    for name in _UNKNOWN:
        if text.get(name):
            raise ConfigError(f"{text.where}: {name!r} is of a model without attention in all layers, or not a decoder "
                              "alone, whose costs are not known: calibrate an engine instead")  # fmt: skip
    kinds = text.get("layer_types") or ()
    if strange := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"{text.where}: 'layer_types' has {strange[0]!r}, whose costs are not known: calibrate an "
                          "engine instead")  # fmt: skip
    layers, hidden, heads = (text.number(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if not layers or not hidden or not heads:
        raise ConfigError(f"{text.where}: num_hidden_layers, hidden_size and num_attention_heads must be above 0")
    gemma = str(text.get("model_type")).startswith("gemma3")
    experts = _experts(text, layers)
    sliding, window = _windows(text, layers, kinds)
    return ConfiguredLlm(
        layers,
        hidden,
        heads,
        text.number("num_key_value_heads", heads),
        text.number("head_dim", hidden // heads),
        0 if experts is not None and experts.layers == layers else _dense_ffn(text),
        text.number("vocab_size"),
        bool(text.get("tie_word_embeddings")),
        bool(text.get("attention_bias")),
        4 if gemma else 2,
        gemma or str(text.get("model_type")).startswith("qwen3"),
        experts,
        _latent(text),
        sliding,
        window,
    )


def _dense_ffn(text: _Fields) -> int:
    return text.number("intermediate_size_mlp" if text.has("intermediate_size_mlp") else "intermediate_size")


def _experts(text: _Fields, layers: int) -> Experts | None:
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    number = next((text.number(name) for name in names if text.get(name)), 0)
    if not number:
        return None
    chosen = text.number("num_experts_per_tok")
    if not 0 < chosen <= number:
        raise ConfigError(f"{text.where}: 'num_experts_per_tok' must be from 1 to {number}, got {chosen}")
    ffn = (
        text.number("moe_intermediate_size") if text.has("moe_intermediate_size") else text.number("intermediate_size")
    )
    shared = text.number("n_shared_experts", 0) * ffn or text.number("shared_expert_intermediate_size", 0)
    dense = len(text.get("mlp_only_layers") or ()) or text.number("first_k_dense_replace", 0)
    every = text.number("decoder_sparse_step", 0) or text.number("interleave_moe_layer_step", 0)
    every = every or text.number("moe_layer_freq", 1) or 1
    sparse = (layers - dense) // every
    if sparse < 1:
        raise ConfigError(
            f"{text.where}: it has {number} experts, but no layer has them: is 'num_hidden_layers' right?"
        )
    return Experts(sparse, number, chosen, ffn, shared)


def _latent(text: _Fields) -> LatentAttention | None:
    if not text.has("kv_lora_rank"):
        return None
    return LatentAttention(
        text.number("q_lora_rank", 0),
        *(text.number(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    )


def _windows(text: _Fields, layers: int, kinds: Any) -> tuple[int, int]:
    """Return the layers with a sliding window, and its tokens."""
    window = text.number("sliding_window", 0)
    if not window or text.get("use_sliding_window") is False:
        return 0, 0
    if kinds:
        return sum(kind == "sliding_attention" for kind in kinds), window
    if str(text.get("model_type")).startswith("gemma3"):
        return layers - layers // text.number("sliding_window_pattern", 6), window
    return layers, window


def _precision(config: Mapping[str, Any], where: str) -> Precision:
    """Return the format of the checkpoint's layers."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return Precision()
    method, bits = str(found.get("quant_method", "")).lower(), found.get("bits", found.get("w_bit"))
    text = json.dumps(found)
    if method in ("fp8", "fbgemm_fp8") or bits == 8 or '"num_bits": 8' in text:
        return Precision(WeightFormat.FP8)
    if (method in _INT4 and bits in (4, None)) or '"num_bits": 4' in text:
        return Precision(WeightFormat.INT4)
    raise ConfigError(f"{where}: quantization_config with quant_method {method!r} is not known: name the format of the "
                      "weights yourself, or use the config.json of the unquantised model")  # fmt: skip


def _vision(vision: _Fields, config: Mapping[str, Any], hidden: int) -> tuple[dict[str, Encoding], LargestItem]:
    if vision.has("depth"):
        return _qwen_vision(vision, hidden)
    layers, width = vision.number("num_hidden_layers"), vision.number("hidden_size")
    patch, size = vision.number("patch_size"), vision.number("image_size")
    if not patch or size < patch:
        raise ConfigError(f"{vision.where}: 'image_size' must be at least 'patch_size', and both above 0")
    patches = (size // patch) ** 2
    embeds = _whole(config.get("mm_tokens_per_image")) or (
        round(patches * float(config["downsample_ratio"]) ** 2) if config.get("downsample_ratio") else patches
    )
    merged = max(1, patches // embeds)
    entry = width if config.get("mm_tokens_per_image") else width * merged
    widths = (entry, hidden) if config.get("mm_tokens_per_image") else (entry, hidden, hidden)
    ffn = vision.number("intermediate_size")
    tower = TowerShape(layers, width, ffn, merged, 3 * patch * patch, widths, other_parameters=patches * width)
    return {"image": Encoding(tower, size * size / embeds * PIXEL_SECONDS, embeds)}, fixed(embeds)


def _qwen_vision(vision: _Fields, hidden: int) -> tuple[dict[str, Encoding], LargestItem]:
    """Return the tower of Qwen2-VL, Qwen2.5-VL or Qwen3-VL."""
    first = vision.has("embed_dim")  # Qwen2-VL: 'hidden_size' is that of the LLM
    width = vision.number("embed_dim" if first else "hidden_size")
    ffn = 4 * width if first else vision.number("intermediate_size")
    merge, patch = vision.number("spatial_merge_size", 2), vision.number("patch_size", 14)
    merged = merge * merge
    full = vision.get("fullatt_block_indexes")
    window = (vision.number("window_size", 0) // patch) ** 2
    mergers = 1 + len(vision.get("deepstack_visual_indexes") or ())
    entry = width * merged
    one = (entry + 1) * entry + (entry + 1) * hidden
    tower = TowerShape(
        vision.number("depth"),
        width,
        ffn,
        merged,
        3 * vision.number("temporal_patch_size", 2) * patch * patch,
        (entry, entry, hidden),
        gated=str(vision.get("hidden_act")) == "silu",
        full_layers=len(full) if full else None,
        window_patches=window if full else 0,
        other_parameters=(mergers - 1) * one + vision.number("num_position_embeddings", 0) * width,
    )
    pixels = merged * patch * patch
    return {
        "image": Encoding(tower, pixels * PIXEL_SECONDS),
        "video": Encoding(tower, 2 * pixels * PIXEL_SECONDS, sequence_embeds=768),
    }, qwen25_vl


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

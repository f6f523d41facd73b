"""Read decoders of known families, with the values that their classes in Transformers take for missing fields.

`FAMILIES` is the list of those that are understood. A ``model_type`` that is not in it is refused, and so is a field
that tells of experts, patterns of layers or other attention, and that the family does not read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.configured.decoder import ConfiguredLlm, Experts, LatentAttention
from vllm_omni_sched.sim.costs.configured.fields import Fields

MEASURE = (
    "measure an engine that serves it with `vllm-omni-sched calibrate`, and name the file with `plan --calibration`, "
    "or as `calibration` of the stage in a scenario"
)
_NONE: Mapping[str, Any] = MappingProxyType({})

_STRUCTURE = re.compile(
    r"^moe_|_moe_|expert|_pattern$|^block_types$|block_type$|cross_attention|mamba|^ssm_|state_size|^linear_|attn_type"
    r"|^rwkv|^lru_|^conv_|^attn_layer|is_encoder_decoder|^layer_group|^index_(topk|n_heads|head_dim)$"
)
"""Names of fields that change the shape of a model."""
_SAME_SHAPE = frozenset(
    (
        "experts_per_token",  # of gpt-oss: the same as num_experts_per_tok
        "moe_capacity",
        "moe_gate",
        "moe_norm_min",
        "moe_use_aux_free",
        "moe_dropout_prob",
        "moe_aux_loss_coef",
        "moe_router_dtype",
        "moe_z_loss_coef",
        "output_router_logits",
    )
)
"""Fields that look as if they changed the shape of a model, and do not."""

_Windows = Callable[[Fields, int], int]
"""Function from fields and layers to the layers that have a sliding window, if the file has no ``layer_types``."""


def _no_windows(text: Fields, layers: int) -> int:
    return 0


def _all_windows(text: Fields, layers: int) -> int:
    return layers


def _last_windows(text: Fields, layers: int) -> int:
    """Return the layers from ``max_window_layers`` on."""
    return max(0, layers - text.number("max_window_layers", layers))


def _every_other_first_window(text: Fields, layers: int) -> int:
    """Return every other one of the first ``max_window_layers``, as Qwen2-MoE has them."""
    return (min(layers, text.number("max_window_layers", layers)) + 1) // 2


def _all_but_each(period: int, name: str = "") -> _Windows:
    """Return the rule that each ``period``-th layer is full; the field ``name`` may tell the period."""

    def windows(text: Fields, layers: int) -> int:
        return layers - layers // (text.count(name, period) if name else period)

    return windows


def _rotated_windows(text: Fields, layers: int) -> int:
    """Return the layers with rotary positions, which Llama 4 computes in chunks."""
    rotated = text.numbers("no_rope_layers")
    if rotated:
        if len(rotated) != layers:
            raise ConfigError(f"{text.where}: 'no_rope_layers' must have 'num_hidden_layers' entries, {layers}, got "
                              f"{len(rotated)}")  # fmt: skip
        return sum(map(bool, rotated))
    return layers - layers // text.count("no_rope_layer_interval", 4)


_ExpertRule = Callable[[Fields, int], Experts | None]
"""Function from fields and layers to the routed experts; None if the file has none."""


def _dense(text: Fields, layers: int) -> Experts | None:
    return None


def _experts(text: Fields, sparse: int, number: int, ffn: int, shared_ffn: int = 0, chosen: str = "") -> Experts:
    name = chosen or "num_experts_per_tok"
    if not 1 <= (active := text.count(name)) <= number:
        raise ConfigError(f"{text.where}: {name!r} must be from 1 to the number of experts, {number}, got {active}")
    if sparse < 1:
        raise ConfigError(f"{text.where}: it has {number} experts, but no layer has them: correct 'num_hidden_layers', "
                          "or the fields that tell which layers have experts")  # fmt: skip
    return Experts(sparse, number, active, ffn, shared_ffn)


def _number(text: Fields, *names: str) -> int:
    """Return the first of these fields that is above 0; Transformers takes the names for one another."""
    return next((text.number(name) for name in names if text.get(name)), 0)


def _mixtral(text: Fields, layers: int) -> Experts | None:
    """Return experts in all layers, as wide as ``intermediate_size``; IBM's have one for all tokens beside them."""
    number = _number(text, "num_local_experts", "num_experts")
    shared = text.number("shared_intermediate_size", 0)
    return _experts(text, layers, number, text.count("intermediate_size"), shared) if number else None


def _qwen(text: Fields, layers: int) -> Experts | None:
    number = _number(text, "num_experts", "num_local_experts")
    step, dense = text.count("decoder_sparse_step", 1), frozenset(text.numbers("mlp_only_layers"))
    shared = text.number("shared_expert_intermediate_size", 0)
    if not number:
        return None
    sparse = layers // step - sum(1 for at in dense if at < layers and not (at + 1) % step)
    return _experts(text, sparse, number, text.count("moe_intermediate_size"), shared)


def _deepseek(text: Fields, layers: int) -> Experts | None:
    number = _number(text, "n_routed_experts", "num_local_experts")
    first, step = text.number("first_k_dense_replace", 0), text.count("moe_layer_freq", 1)
    shared = text.number("n_shared_experts", 0)
    if not number:
        return None
    ffn = text.count("moe_intermediate_size")
    first = min(first, layers)
    return _experts(text, -(-layers // step) + -first // step, number, ffn, shared * ffn)


def _llama4(text: Fields, layers: int) -> Experts | None:
    """Return experts beside one for all tokens, which is as wide as they are."""
    number = _number(text, "num_local_experts", "num_experts")
    step, named = text.count("interleave_moe_layer_step", 1), text.numbers("moe_layers")
    if not number:
        return None
    sparse = sum(1 for at in set(named) if at < layers) if text.has("moe_layers") else layers // step
    ffn = text.count("intermediate_size")
    return _experts(text, sparse, number, ffn, ffn)


def _ernie(text: Fields, layers: int) -> Experts | None:
    number = _number(text, "moe_num_experts", "num_experts")
    step, start = text.count("moe_layer_interval", 1), text.number("moe_layer_start_index", 0)
    last = layers - 1 if text.get("moe_layer_end_index") in (None, -1) else text.number("moe_layer_end_index")
    shared = text.number("moe_num_shared_experts", 0)
    if not number:
        return None
    last = min(last, layers - 1)
    sparse = (last + 1) // step - start // step if last >= start else 0
    ffn = text.count("moe_intermediate_size")
    return _experts(text, sparse, number, ffn, shared * ffn, "moe_k" if text.has("moe_k") else "")


@dataclass(frozen=True)
class Family:
    """Decoders of one ``model_type``.

    ``defaults``: values of Transformers' class. ``gated``: the MLP has a gate. ``norms``: scales as wide as the model
    in a layer; ``norm_biases``: each has a bias, too. ``qkv_bias``, ``output_bias``, ``mlp_bias``: whether there are
    such biases, or the field that tells it. ``query_norm``: the scales of queries and keys, ``head`` for one head that
    all share, ``wide`` for all; ``query_norm_field``: the field that turns them on, if there is one. ``head_bias``: the
    output matrix has a bias. ``biased_experts``: the routed experts' matrices have biases. ``latent``: attention is
    DeepSeek's. ``window``: the field with the tokens of a window. ``dense_ffn``: the field with the width of layers
    without experts.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    gated: bool = True
    norms: int = 2
    norm_biases: bool = False
    qkv_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    query_norm: str = ""
    query_norm_field: str = ""
    head_bias: str | bool = False
    experts: _ExpertRule = _dense
    biased_experts: bool = False
    latent: bool = False
    windows: _Windows = _no_windows
    window: str = "sliding_window"
    dense_ffn: str = "intermediate_size"

    def read(self, text: Fields) -> ConfiguredLlm:
        """Return the decoder with these fields.

        Raises:
            ConfigError: a field is missing or wrong, or one tells of a shape that is not understood.
        """
        layers, hidden = text.count("num_hidden_layers"), text.count("hidden_size")
        heads = text.count("num_attention_heads")
        kv_heads = text.count("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ConfigError(f"{text.where}: 'num_key_value_heads' must divide 'num_attention_heads', {heads}, got "
                              f"{kv_heads}")  # fmt: skip
        latent = _latent(text) if self.latent else None
        if latent is None and not text.has("head_dim") and hidden % heads:
            raise ConfigError(f"{text.where}: 'hidden_size', {hidden}, must be a multiple of 'num_attention_heads', "
                              f"{heads}, or 'head_dim' must be given")  # fmt: skip
        head = text.count("head_dim", max(1, hidden // heads))
        experts = self.experts(text, layers)
        sliding, window = self._sliding(text, layers)
        all_sparse = experts is not None and experts.layers == layers
        ffn = 0 if all_sparse else text.count(self.dense_ffn)
        vocab, tied = text.count("vocab_size"), text.flag("tie_word_embeddings")
        width = 2 if self.norm_biases else 1
        if experts is not None and self.biased_experts:
            experts = Experts(experts.layers, experts.number, experts.chosen, experts.ffn, experts.shared_ffn, True)
        found = ConfiguredLlm(
            layers,
            hidden,
            heads,
            kv_heads,
            head,
            ffn,
            vocab,
            tied,
            3 if self.gated else 2,
            self._vectors(text, hidden, heads, kv_heads, head, ffn) + self.norms * width * hidden,
            width * hidden + (vocab if self._is_on(text, self.head_bias) else 0),
            experts,
            latent,
            sliding,
            window,
        )
        _refuse_unread(text)
        return found

    def _vectors(self, text: Fields, hidden: int, heads: int, kv_heads: int, head: int, ffn: int) -> int:
        """Return the numbers in biases, and in scales of queries and keys, of a layer."""
        queries = (heads + 2 * kv_heads) * head
        found = queries if self._is_on(text, self.qkv_bias) else 0
        found += hidden if self._is_on(text, self.output_bias) else 0
        found += (2 if self.gated else 1) * ffn + hidden if self._is_on(text, self.mlp_bias) else 0
        if self.query_norm and (not self.query_norm_field or text.flag(self.query_norm_field)):
            found += 2 * head if self.query_norm == "head" else (heads + kv_heads) * head
        return found

    @staticmethod
    def _is_on(text: Fields, bias: str | bool) -> bool:
        return text.flag(bias) if isinstance(bias, str) else bias

    def _sliding(self, text: Fields, layers: int) -> tuple[int, int]:
        """Return the layers with a sliding window, and its tokens."""
        window = text.number(self.window, 0)
        off = text.has("use_sliding_window") and not text.flag("use_sliding_window")
        kinds, count = text.words("layer_types"), self.windows(text, layers)
        sliding = "chunked_attention" if self.window == "attention_chunk_size" else "sliding_attention"
        if strange := sorted(set(kinds) - {"full_attention", sliding}):
            raise ConfigError(f"{text.where}: 'layer_types' has {strange[0]!r}, whose costs are not known: {MEASURE}")
        if kinds:
            if len(kinds) != layers:
                raise ConfigError(f"{text.where}: 'layer_types' must have 'num_hidden_layers' entries, {layers}, got "
                                  f"{len(kinds)}")  # fmt: skip
            count = kinds.count(sliding)
        return (count, window) if window and count and not off else (0, 0)


def _latent(text: Fields) -> LatentAttention:
    return LatentAttention(
        text.number("q_lora_rank", 0),
        *(text.count(name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    )


def _refuse_unread(text: Fields) -> None:
    if (kind := text.word("mlp_type")) not in ("", "default"):
        raise ConfigError(f"{text.where}: the 'mlp_type' {kind!r} is not known: {MEASURE}")
    for name in text.unread():
        if _STRUCTURE.search(name) and name not in _SAME_SHAPE:
            raise ConfigError(f"{text.where}: the field {name!r} changes the shape of a model in a way that is not "
                              f"known for the model_type {text.get('model_type')!r}: {MEASURE}")  # fmt: skip


def family(text: Fields) -> Family:
    """Return the family of a table's ``model_type``.

    Raises:
        ConfigError: it is missing or not known; the message names those that are.
    """
    name = text.word("model_type")
    if not name:
        raise ConfigError(f"{text.where}: the field 'model_type' is missing, and the costs need it: copy it from the "
                          "config.json of the model's repository")  # fmt: skip
    if name not in FAMILIES:
        raise ConfigError(f"{text.where}: the shape of the model_type {name!r} is not known: {MEASURE}. Known are "
                          f"{', '.join(sorted(FAMILIES))}")  # fmt: skip
    return FAMILIES[name]


def _sizes(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int | None, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    """Return the defaults of a class of Transformers by their names."""
    return {
        "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": context, **more,
    }  # fmt: skip


def _families() -> dict[str, Family]:
    qwen2 = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
    qwen2_vl = _sizes(8192, 29568, 80, 64, 8, 152064, 32768, **{**qwen2, "max_window_layers": 80})
    omni = _sizes(3584, 18944, 28, 28, 4, 152064, 32768, **{**qwen2, "sliding_window": 32768}, tie_word_embeddings=True)
    moe = {"decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128}
    large = _sizes(2048, 6144, 24, 32, 4, 151936, 32768, **moe, use_sliding_window=False, sliding_window=4096)
    shared = {"decoder_sparse_step": 1, "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60}
    qwen3 = _sizes(4096, 22016, 32, 32, 32, 151936, 32768, head_dim=128)
    latent = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    deepseek = _sizes(
        7168, 18432, 61, 128, 128, 129280, 4096, **latent, v_head_dim=128, n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3,
    )  # fmt: skip
    gemma = {"head_dim": 256, "tie_word_embeddings": True}
    granite = _sizes(4096, 11008, 32, 32, None, 32000, 2048)
    granite_moe = {**granite, "num_local_experts": 8, "num_experts_per_tok": 2}

    def plain_qwen2(defaults: dict[str, Any]) -> Family:
        return Family(defaults, qkv_bias=True, output_bias=False, windows=_last_windows)

    def latent_experts(defaults: dict[str, Any]) -> Family:
        return Family(defaults, qkv_bias=False, output_bias=False, latent=True, experts=_deepseek)

    def granite_experts(defaults: dict[str, Any]) -> Family:
        return Family(defaults, experts=_mixtral)

    def qwen3_experts(defaults: dict[str, Any]) -> Family:
        return Family(defaults, query_norm="head", experts=_qwen, windows=_all_windows)

    return {
        "llama": Family(_sizes(4096, 11008, 32, 32, None, 32000, 2048), mlp_bias="mlp_bias"),
        "mistral": Family(
            _sizes(4096, 14336, 32, 32, 8, 32000, 131072, sliding_window=4096), qkv_bias=False, output_bias=False,
            windows=_all_windows,
        ),
        "mixtral": Family(
            _sizes(4096, 14336, 32, 32, 8, 32000, 131072, num_local_experts=8, num_experts_per_tok=2), qkv_bias=False,
            output_bias=False, experts=_mixtral, windows=_all_windows,
        ),
        "qwen2": plain_qwen2(_sizes(4096, 22016, 32, 32, 32, 151936, 32768, **qwen2)),
        "qwen2_vl_text": plain_qwen2(qwen2_vl),
        "qwen2_5_vl_text": plain_qwen2(qwen2_vl),
        "qwen2_5_omni_text": plain_qwen2(omni),
        "qwen2_moe": Family(
            _sizes(2048, 5632, 24, 16, 16, 151936, 32768, **qwen2, **shared, shared_expert_intermediate_size=5632,
                   qkv_bias=True),
            qkv_bias="qkv_bias", output_bias=False, experts=_qwen, windows=_every_other_first_window,
        ),
        "qwen3": Family({**qwen3, **qwen2}, query_norm="head", windows=_last_windows),
        "qwen3_vl_text": Family({**qwen3, "max_position_embeddings": 128000}, query_norm="head"),
        "qwen3_moe": qwen3_experts(large),
        "qwen3_vl_moe_text": qwen3_experts(
            _sizes(2048, 5632, 24, 16, 16, 151936, 128000, **shared, tie_word_embeddings=True)
        ),
        "qwen3_omni_moe_text": qwen3_experts(_sizes(2048, 18944, 28, 28, 4, 3584, 32768, **moe)),
        "gemma": Family(_sizes(3072, 24576, 28, 16, 16, 256000, 8192, **gemma)),
        "gemma2": Family(
            _sizes(2304, 9216, 26, 8, 4, 256000, 8192, **gemma, sliding_window=4096), norms=4, windows=_all_but_each(2)
        ),
        "gemma3_text": Family(
            _sizes(2304, 9216, 26, 8, 4, 262208, 131072, **gemma, sliding_window=4096), norms=4, query_norm="head",
            windows=_all_but_each(6, "sliding_window_pattern"),
        ),
        "phi": Family(
            _sizes(2048, 8192, 24, 32, None, 51200, 2048), gated=False, norms=1, norm_biases=True, qkv_bias=True,
            output_bias=True, mlp_bias=True, query_norm="head", query_norm_field="qk_layernorm", head_bias=True,
        ),
        "phi3": Family(
            _sizes(3072, 8192, 32, 32, None, 32064, 4096), qkv_bias=False, output_bias=False, windows=_all_windows
        ),
        "gpt_neox": Family(
            _sizes(6144, 24576, 44, 64, None, 50432, 2048, attention_bias=True), gated=False, norm_biases=True,
            mlp_bias=True,
        ),
        "starcoder2": Family(
            _sizes(3072, 12288, 30, 24, 2, 49152, 4096, use_bias=True, tie_word_embeddings=True), gated=False,
            norm_biases=True, qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", windows=_all_windows,
        ),
        "nemotron": Family(
            _sizes(6144, 24576, 32, 48, None, 256000, 4096), gated=False, norm_biases=True, mlp_bias="mlp_bias"
        ),
        "olmo2": Family(_sizes(4096, 11008, 32, 32, None, 50304, 2048), query_norm="wide"),
        "olmoe": Family(
            _sizes(2048, 2048, 16, 16, None, 50304, 4096, num_experts=64, num_experts_per_tok=8), query_norm="wide",
            experts=_mixtral,
        ),
        "granite": Family(granite, mlp_bias="mlp_bias"),
        "granitemoe": granite_experts(granite_moe),
        "granitemoeshared": granite_experts(granite_moe),
        "cohere": Family(
            _sizes(8192, 22528, 40, 64, None, 256000, 8192, tie_word_embeddings=True), norms=1, query_norm="wide",
            query_norm_field="use_qk_norm",
        ),
        "cohere2": Family(
            _sizes(8192, 22528, 40, 64, None, 256000, 8192, tie_word_embeddings=True, sliding_window=4096), norms=1,
            windows=_all_but_each(4, "sliding_window_pattern"),
        ),
        "deepseek_v2": latent_experts(
            _sizes(4096, 11008, 32, 32, None, 32000, 2048, **latent, v_head_dim=128, n_routed_experts=64,
                   n_shared_experts=2, moe_intermediate_size=1407, first_k_dense_replace=0)
        ),
        "deepseek_v3": latent_experts(deepseek),
        "kimi_k2": latent_experts(deepseek),  # DeepSeek-V3's classes with other sizes
        "glm4": Family(
            _sizes(4096, 13696, 40, 32, 2, 151552, 131072, head_dim=128, attention_bias=True), norms=4,
            output_bias=False,
        ),
        "glm4_moe": Family(
            _sizes(4096, 10944, 46, 96, 8, 151552, 131072, moe_intermediate_size=1408, num_experts_per_tok=8,
                   n_shared_experts=1, n_routed_experts=128, first_k_dense_replace=1),
            output_bias=False, query_norm="head", query_norm_field="use_qk_norm", experts=_deepseek,
        ),
        "gpt_oss": Family(
            _sizes(2880, 2880, 36, 64, 8, 201088, 131072, head_dim=64, num_local_experts=128, num_experts_per_tok=4,
                   sliding_window=128, attention_bias=True),
            experts=_mixtral, biased_experts=True, windows=_all_but_each(2),
        ),
        "llama4_text": Family(
            _sizes(5120, 8192, 48, 40, 8, 202048, 131072, head_dim=128, intermediate_size_mlp=16384,
                   num_experts_per_tok=1, num_local_experts=16, interleave_moe_layer_step=1, attention_chunk_size=8192),
            experts=_llama4, windows=_rotated_windows, window="attention_chunk_size",
            dense_ffn="intermediate_size_mlp",
        ),
        "ernie4_5": Family(
            _sizes(1024, 3072, 18, 16, 2, 103424, 131072, head_dim=128, tie_word_embeddings=True), qkv_bias="use_bias",
            output_bias="use_bias", mlp_bias="use_bias", head_bias="use_bias",
        ),
        "ernie4_5_moe": Family(
            _sizes(2560, 12288, 28, 20, 4, 103424, 131072, tie_word_embeddings=True, moe_intermediate_size=1536,
                   moe_k=6, moe_num_experts=64, moe_num_shared_experts=2, moe_layer_start_index=1,
                   moe_layer_end_index=-1, moe_layer_interval=1),
            qkv_bias="use_bias", output_bias="use_bias", mlp_bias="use_bias", head_bias="use_bias", experts=_ernie,
        ),
        "internlm2": Family(_sizes(4096, 11008, 32, 32, None, 103168, 2048), qkv_bias="bias", output_bias="bias"),
    }  # fmt: skip


FAMILIES = _families()
"""Families by the ``model_type`` of their decoder's table."""
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
)  # fmt: skip
"""Fields that every file has which is not part of another: without them it is incomplete."""

"""Decoders and towers have as many parameters as the classes of Transformers, for every family that is read."""

import pytest

from tests.unit.sim.costs.test_config_json import DEEPSEEK, GEMMA_27B, LLAMA_8B, MIXTRAL, QWEN_MOE, QWEN_VL
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.config_json import COMPOSITES, THINKERS, shape_of
from vllm_omni_sched.sim.costs.configured.families import FAMILIES
from vllm_omni_sched.sim.costs.configured.fields import Fields
from vllm_omni_sched.sim.costs.configured.towers import TOWERS


def sizes(model_type, hidden, ffn, layers, heads, kv_heads, vocab, **more):
    return {
        "model_type": model_type, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab, **more,
    }  # fmt: skip


SCOUT = sizes(
    "llama4_text", 5120, 8192, 48, 40, 8, 202048, head_dim=128, intermediate_size_mlp=16384, num_local_experts=16,
    num_experts_per_tok=1, interleave_moe_layer_step=1, attention_chunk_size=8192, tie_word_embeddings=False,
)  # fmt: skip
MAVERICK = SCOUT | {"num_local_experts": 128, "interleave_moe_layer_step": 2}
QWEN2 = sizes("qwen2", 3584, 18944, 28, 28, 4, 152064, tie_word_embeddings=False)
GRANITE_MOE = sizes(
    "granitemoe", 1536, 512, 32, 24, 8, 49155, num_local_experts=40, num_experts_per_tok=8, tie_word_embeddings=True
)
GLM_MOE = sizes(
    "glm4_moe", 4096, 10944, 46, 96, 8, 151552, head_dim=128, attention_bias=True, moe_intermediate_size=1408,
    n_routed_experts=128, n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1,
)  # fmt: skip
ERNIE_MOE = sizes(
    "ernie4_5_moe", 2560, 12288, 28, 20, 4, 103424, moe_num_experts=64, moe_k=6, moe_intermediate_size=1536,
    moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_interval=1, tie_word_embeddings=True,
    moe_capacity=[64, 64, 64], moe_gate="topk", moe_use_aux_free=True,
)  # fmt: skip
GPT_OSS = sizes(
    "gpt_oss", 2880, 2880, 24, 64, 8, 201088, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    experts_per_token=4, attention_bias=True, sliding_window=128, tie_word_embeddings=False,
)  # fmt: skip
COMMAND_R = sizes("cohere", 8192, 22528, 40, 64, 64, 256000)
QWEN15_MOE = sizes(
    "qwen2_moe", 2048, 5632, 24, 16, 16, 151936, num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632, decoder_sparse_step=1, use_sliding_window=False, sliding_window=32768,
)  # fmt: skip
PUBLISHED = {  # with the parameters on the card, in 10⁹
    "llama-3.1-8b": (LLAMA_8B, 8.03),
    "llama-3.2-1b": (
        sizes("llama", 2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True), 1.236,
    ),
    "mistral-7b-v0.1": (sizes("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096), 7.24),
    "mixtral-8x7b": (MIXTRAL, 46.7),
    "qwen2.5-7b": (QWEN2, 7.62),
    "qwen1.5-moe-a2.7b": (QWEN15_MOE, 14.3),
    "qwen3-8b": (sizes("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=False), 8.19),
    "qwen3-30b-a3b": (QWEN_MOE, 30.5),
    "gemma-7b": (sizes("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256), 8.54),
    "gemma-2-9b": (sizes("gemma2", 3584, 14336, 42, 16, 8, 256000, head_dim=256, sliding_window=4096), 9.24),
    "phi-2": (sizes("phi", 2560, 10240, 32, 32, None, 51200), 2.78),
    "phi-3-mini": (sizes("phi3", 3072, 8192, 32, 32, 32, 32064, sliding_window=2047), 3.82),
    "pythia-6.9b": (sizes("gpt_neox", 4096, 16384, 32, 32, None, 50432), 6.86),
    "starcoder2-7b": (
        sizes("starcoder2", 4608, 18432, 32, 36, 4, 49152, sliding_window=4096, mlp_type="default"), 7.17,
    ),
    "olmo-2-7b": (sizes("olmo2", 4096, 11008, 32, 32, 32, 100352), 7.3),
    "olmoe-1b-7b": (sizes("olmoe", 2048, 1024, 16, 16, 16, 50304, num_experts=64, num_experts_per_tok=8), 6.92),
    "granite-3.1-8b": (sizes("granite", 4096, 12800, 40, 32, 8, 49155, tie_word_embeddings=True), 8.17),
    "command-r": (COMMAND_R, 34.98),
    "command-r7b": (sizes("cohere2", 4096, 14336, 32, 32, 8, 256000, sliding_window=4096), 8.03),
    "deepseek-v2-lite": (
        sizes(
            "deepseek_v2", 2048, 10944, 27, 16, 16, 102400, n_routed_experts=64, n_shared_experts=2,
            num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, moe_layer_freq=1,
            kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ),
        15.7,
    ),
    "deepseek-v3": (DEEPSEEK, 671.0),
    "glm-4-9b-0414": (
        sizes("glm4", 4096, 13696, 40, 32, 2, 151552, head_dim=128, attention_bias=False), 9.4,
    ),
    "gpt-oss-20b": (GPT_OSS, 20.9),
    "llama-4-maverick": (MAVERICK, 400.7),
    "ernie-4.5-0.3b": (sizes("ernie4_5", 1024, 3072, 18, 16, 2, 103424, head_dim=128), 0.36),
    "ernie-4.5-21b-a3b": (ERNIE_MOE, 21.8),
}  # fmt: skip
VARIANTS = {
    "gemma-3-27b": GEMMA_27B["text_config"],
    "glm-4.5-air": GLM_MOE,
    "glm-4.5": GLM_MOE | {"use_qk_norm": True, "first_k_dense_replace": 3, "n_shared_experts": 2},
    "granite-moe": GRANITE_MOE,
    "granite-moe with more": GRANITE_MOE | {"model_type": "granitemoeshared", "shared_intermediate_size": 1024},
    "minitron-8b": sizes("nemotron", 4096, 16384, 32, 48, 8, 256000, head_dim=128),
    "llama with biases": LLAMA_8B | {"attention_bias": True, "mlp_bias": True},
    "command-r-plus": COMMAND_R | {"num_key_value_heads": 8, "use_qk_norm": True},
    "qwen3-moe with dense layers": QWEN_MOE | {"mlp_only_layers": [0, 1, 5, 47], "decoder_sparse_step": 2},
    "qwen2 with windows": QWEN2 | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21},
    "qwen2-moe with windows": QWEN15_MOE | {"use_sliding_window": True, "max_window_layers": 21},
    "qwen2 with a window that is off": QWEN2 | {"sliding_window": 4096},
    "mistral-7b-v0.3": sizes("mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None),
    "gemma-3 with a pattern": GEMMA_27B["text_config"] | {"sliding_window_pattern": 4},
    "llama-4-scout": SCOUT,
    "ernie in part": ERNIE_MOE | {"moe_layer_start_index": 3, "moe_layer_end_index": 20, "moe_layer_interval": 2},
    "phi with norms of queries": sizes("phi", 2560, 10240, 32, 32, None, 51200, qk_layernorm=True),
}
LLAVA = {
    "model_type": "llava", "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    "vision_config": {
        "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
    },
    "vision_feature_layer": -1,
}  # fmt: skip
SCOUT_VISION = {
    "model_type": "llama4", "text_config": SCOUT,
    "vision_config": {
        "model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632,
        "num_attention_heads": 16, "num_hidden_layers": 34, "patch_size": 14, "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096,
    },
}  # fmt: skip
_SLIM = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
         "mlp_only_layers")  # fmt: skip
_MOE_TEXT = {name: QWEN_MOE[name] for name in _SLIM if name in QWEN_MOE}
_QWEN_TEXT = {name: QWEN_VL[name] for name in _SLIM if name in QWEN_VL}
_DENSE3_TEXT = {name: PUBLISHED["qwen3-8b"][0][name] for name in _SLIM if name in PUBLISHED["qwen3-8b"][0]}
QWEN3_OMNI = {
    "model_type": "qwen3_omni_moe", "enable_audio_output": True,
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": _MOE_TEXT,
        "audio_config": {"d_model": 1280, "encoder_layers": 32, "encoder_ffn_dim": 5120, "output_dim": 2048},
        "vision_config": {"depth": 27, "hidden_size": 1152, "out_hidden_size": 2048},
    },
    "talker_config": {}, "code2wav_config": {},
}  # fmt: skip
WITH_TOWERS = {
    "llava-1.5-7b": LLAVA,
    "gemma-3-27b": GEMMA_27B | {"vision_config": GEMMA_27B["vision_config"] | {"vision_use_head": False}},
    "llama-4-scout": SCOUT_VISION,
    "mistral-small-3.1-24b": {
        "model_type": "mistral3", "spatial_merge_size": 2, "tie_word_embeddings": False,
        "text_config": sizes("mistral", 5120, 32768, 40, 32, 8, 131072, head_dim=128, sliding_window=None),
        "vision_config": {
            "model_type": "pixtral", "head_dim": 64, "hidden_size": 1024, "image_size": 1540, "intermediate_size": 4096,
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14,
        },
    },
    "internvl3-8b-hf": {
        "model_type": "internvl", "tie_word_embeddings": False, "text_config": QWEN2 | {"vocab_size": 151674},
        "vision_config": {"model_type": "internvl_vision", "attention_bias": True},
    },
    "qwen2-vl-7b": {"model_type": "qwen2_vl", "text_config": _QWEN_TEXT, "vision_config": {"hidden_size": 3584}},
    "qwen2.5-vl-7b": {
        "model_type": "qwen2_5_vl", "text_config": _QWEN_TEXT,
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584},
    },
    "qwen3-vl-8b": {
        "model_type": "qwen3_vl", "text_config": _DENSE3_TEXT, "vision_config": {"out_hidden_size": 4096},
    },
    "qwen3-vl-30b-a3b": {
        "model_type": "qwen3_vl_moe", "text_config": _MOE_TEXT, "vision_config": {"out_hidden_size": 2048},
    },
    "qwen2.5-omni-7b, the thinker": {
        "model_type": "qwen2_5_omni_thinker", "text_config": _QWEN_TEXT,
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584}, "audio_config": {"output_dim": 3584},
    },
    "qwen3-omni-30b-a3b, the thinker": QWEN3_OMNI["thinker_config"],
}  # fmt: skip
NOT_IN_TRANSFORMERS = {"internlm2", "kimi_k2", "internvl_chat"}


def meta_model(config):
    """Return the model of Transformers for the fields of a file, without memory for its weights."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.qwen2_5_omni import Qwen2_5OmniThinkerForConditionalGeneration
    from transformers.models.qwen3_omni_moe import Qwen3OmniMoeThinkerForConditionalGeneration

    fields = {name: value for name, value in config.items() if name not in ("model_type", "quantization_config")}
    kind = config["model_type"]
    found = CONFIG_MAPPING[kind](**fields)
    thinkers = {
        "qwen2_5_omni_thinker": Qwen2_5OmniThinkerForConditionalGeneration,
        "qwen3_omni_moe_thinker": Qwen3OmniMoeThinkerForConditionalGeneration,
    }
    with torch.device("meta"):
        if kind in thinkers:
            return thinkers[kind](found)
        return (AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM).from_config(found)


def counted(model):
    return sum(one.numel() for one in model.parameters())


@pytest.mark.parametrize("name", [*PUBLISHED, *VARIANTS])
def test_a_decoder_is_what_transformers_builds(name):
    config = PUBLISHED[name][0] if name in PUBLISHED else VARIANTS[name]
    model = meta_model(config)
    theirs, ours = model.config, shape_of({**_sized(config), **config}, name).llm
    assert ours.parameters == pytest.approx(counted(model), rel=1e-5)
    assert ours.tied is theirs.tie_word_embeddings
    window = getattr(theirs, "sliding_window", None) or getattr(theirs, "attention_chunk_size", None)
    kinds = getattr(theirs, "layer_types", None) or ["sliding" if window else "full_attention"] * ours.layers
    assert ours.sliding_layers == sum(kind != "full_attention" for kind in kinds)
    assert not ours.sliding_layers or ours.window == window


def _sized(config):
    """Return the sizes that the file of a decoder leaves out because it is a part of another file."""
    defaults = FAMILIES[config["model_type"]].defaults
    return {name: defaults[name] for name in ("vocab_size", "num_attention_heads", "num_key_value_heads")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_on_the_card(name):
    config, published = PUBLISHED[name]
    assert shape_of(config, name).llm.parameters == pytest.approx(published * 1e9, rel=0.01)


@pytest.mark.parametrize("name", WITH_TOWERS)
def test_a_model_with_towers_is_what_transformers_builds(name):
    config = WITH_TOWERS[name]
    model, shape = meta_model(config), shape_of(config, name)
    assert shape.parameters == pytest.approx(counted(model), rel=0.005)
    head = shape.llm.head_parameters * (1 if shape.llm.tied else 2)
    towers = sum(one.parameters for one in {encoding.tower for encoding in shape.encodings.values()})
    parts = dict(model.named_modules())
    names = ("model.language_model", "language_model.model", "model")
    decoder = counted(next(parts[key] for key in names if key in parts))
    assert shape.llm.stored_parameters == pytest.approx(decoder - shape.llm.head_parameters, rel=1e-4)
    assert towers == pytest.approx(counted(model) - decoder - (head - shape.llm.head_parameters), rel=0.02)


def test_every_family_and_tower_is_compared():
    decoders = {config["model_type"] for config, _ in PUBLISHED.values()} | {
        one["model_type"] for one in VARIANTS.values()
    }
    composites = {one["model_type"] for one in WITH_TOWERS.values()}
    parts = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_vl_text", "qwen3_vl_moe_text",
             "qwen3_omni_moe_text"}  # fmt: skip
    thinkers = {"qwen2_5_omni", "qwen3_omni_moe"}
    assert {*FAMILIES, *COMPOSITES, *THINKERS} == decoders | composites | parts | thinkers | NOT_IN_TRANSFORMERS
    # LLaVA has SigLIP with one more layer than Gemma 3, and InternViT-6B the fields of the smaller one
    assert len(TOWERS) == 12


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - NOT_IN_TRANSFORMERS))
def test_fields_that_a_file_leaves_out_are_those_of_the_class(name):
    from transformers import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[name]()
    for field, value in FAMILIES[name].defaults.items():
        if field == "num_key_value_heads" and value is None:  # the class fills it in, or has none of it
            assert getattr(theirs, field, None) in (None, theirs.num_attention_heads)
            continue
        other = getattr(theirs, field)
        if field in ("sliding_window", "moe_layer_end_index") and other != value:  # the class has read other fields
            assert other in (None, 0, theirs.num_hidden_layers - 1)
        else:
            assert other == value, field


@pytest.mark.parametrize("name", sorted(set(TOWERS) - {"intern_vit_6b"}))
def test_fields_that_a_tower_leaves_out_are_those_of_the_class(name):
    from transformers import CONFIG_MAPPING

    theirs = CONFIG_MAPPING[name]()
    for field, value in TOWERS[name][1].items():
        other = getattr(theirs, field)
        assert (other if isinstance(value, str | float) else _plain(other)) == _plain(value), field


def _plain(value):
    """Return the one number of equal sides; other lists as tuples."""
    if isinstance(value, list | tuple):
        return value[0] if len(value) == 2 and value[0] == value[1] else tuple(value)
    return value


def test_families_of_other_code_have_the_published_parameters():
    kimi = DEEPSEEK | {
        "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
        "first_k_dense_replace": 1, "vocab_size": 163840,
    }  # fmt: skip
    assert shape_of(kimi, "kimi-k2").parameters == pytest.approx(1.026e12, rel=0.01)
    internvl = {
        "model_type": "internvl_chat", "downsample_ratio": 0.5,
        "llm_config": sizes("internlm2", 4096, 14336, 32, 32, 8, 92553),
        "vision_config": {"model_type": "intern_vit_6b", "hidden_size": 1024, "num_hidden_layers": 24},
    }  # fmt: skip
    shape = shape_of(internvl, "internvl2.5-8b")
    assert shape.parameters == pytest.approx(8.08e9, rel=0.003)
    assert shape.encodings["image"].sequence_embeds == 256
    assert shape.largest_item(32_768) == 13 * 256


@pytest.mark.parametrize(
    ("config", "active"),
    [(SCOUT, 17.2), (MAVERICK, 17.2), (QWEN_MOE, 3.3), (DEEPSEEK, 37.5), (GPT_OSS, 3.6 + 0.58), (QWEN15_MOE, 2.7)],
)  # fmt: skip
def test_a_token_goes_through_shared_experts_too(config, active):
    assert shape_of(config, "a model").llm.active_parameters == pytest.approx(active * 1e9, rel=0.02)


def test_an_image_has_as_many_embeddings_as_the_tower_leaves():
    scout = shape_of(SCOUT_VISION, "scout")
    assert scout.encodings["image"].sequence_embeds == 144
    assert scout.largest_item(131_072) == 17 * 144
    assert shape_of(LLAVA, "llava").largest_item(4096) == 576
    assert shape_of(WITH_TOWERS["mistral-small-3.1-24b"], "mistral").largest_item(131_072) == 55**2


def test_a_thinker_is_read_inside_its_file():
    shape = shape_of(QWEN3_OMNI, "qwen3-omni")
    assert set(shape.encodings) == {"image", "video", "audio"}
    assert shape.llm == shape_of(QWEN3_OMNI["thinker_config"], "the thinker").llm
    assert shape.llm.kv_numbers_per_token() == shape_of(QWEN_MOE, "a model").llm.kv_numbers_per_token()
    sound, image = shape.encodings["audio"].tower, shape.encodings["image"].tower
    assert (sound.layers, sound.hidden, sound.patches_per_embed) == (32, 1280, 1)
    assert (image.layers, image.hidden, image.patches_per_embed) == (27, 1152, 4)


@pytest.mark.parametrize(
    "model_type",
    ["bert", "nemotron_h", "recurrent_gemma", "mllama", "minimax_m1", "kimi_linear", "t5", "falcon", "llava_next"],
)
def test_other_families_are_refused_by_name(model_type):
    with pytest.raises(
        ConfigError, match=f"the model_type '{model_type}' is not known: measure .*calibrate.* Known are"
    ):
        shape_of(LLAMA_8B | {"model_type": model_type}, "a model")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("moe_num_experts", 64), ("num_experts", 8), ("num_local_experts", 8), ("hybrid_override_pattern", "M-M*"),
        ("block_types", ["recurrent"]), ("cross_attention_layers", [3, 8]), ("mamba_d_state", 128),
        ("linear_attn_config", {"full_attn_layers": [4]}), ("is_encoder_decoder", True), ("ssm_state_size", 128),
    ],
)  # fmt: skip
def test_fields_of_another_shape_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"the field '{field}' changes the shape of a model in a way"):
        shape_of(LLAMA_8B | {field: value}, "a model")
    for off in (None, False, 0, []):
        shape_of(LLAMA_8B | {field: off}, "a model")


def test_unknown_towers_are_refused_by_name():
    with pytest.raises(
        ConfigError, match=r"vision_config: the tower of the model_type 'dinov2' is not known: plan for"
    ):
        shape_of(LLAVA | {"vision_config": {"model_type": "dinov2"}}, "a model")


def test_fields_remember_who_read_them():
    fields = Fields({"a": 1, "b": 2, "c": None, "d": 0}, "here", {"e": 5})
    assert fields.number("a") == 1
    assert fields.number("e") == 5
    assert fields.unread() == ["b"]

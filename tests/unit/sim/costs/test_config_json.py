"""Shapes from a config.json: parameters as published, and what is not understood is refused."""

import json

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.config_json import read_config, shape_of
from vllm_omni_sched.sim.costs.hardware import device
from vllm_omni_sched.sim.costs.models import Precision, WeightFormat, model
from vllm_omni_sched.sim.costs.roofline import Efficiency, Parallel, RooflineCosts

LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 131072, "attention_bias": False,
}  # fmt: skip
QWEN_VL = {
    "model_type": "qwen2_5_vl", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    "max_position_embeddings": 128000, "sliding_window": 32768, "use_sliding_window": False,
    "vision_config": {
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
}  # fmt: skip
QWEN_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "vocab_size": 151936, "tie_word_embeddings": False, "attention_bias": False, "sliding_window": None,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "tie_word_embeddings": False, "attention_bias": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
}  # fmt: skip
GEMMA_4B = {  # as published: heads and vocabulary are left to the defaults
    "model_type": "gemma3", "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": SIGLIP,
}  # fmt: skip
GEMMA_27B = {
    "model_type": "gemma3", "mm_tokens_per_image": 256,
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
        "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024,
    },
    "vision_config": SIGLIP,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
    "vocab_size": 32000, "tie_word_embeddings": False, "sliding_window": None,
}  # fmt: skip
H200 = device("h200-141gb")


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (LLAMA_8B, 8_030_261_248),
        (QWEN_VL, 8_292_166_656),
        (QWEN_MOE, 30_532_122_624),
        (DEEPSEEK, 671_026_419_200),
        (GEMMA_4B, 4_300_079_472),
        (GEMMA_27B, 27_432_406_640),
        (MIXTRAL, 46_702_792_704),
    ],
    ids=["llama-3.1-8b", "qwen2.5-vl-7b", "qwen3-30b-a3b", "deepseek-v3", "gemma-3-4b", "gemma-3-27b", "mixtral-8x7b"],
)
def test_parameters_are_those_that_were_published(config, published):
    assert shape_of(config, "a model").parameters == pytest.approx(published, rel=0.003)


@pytest.mark.parametrize(("config", "active"), [(QWEN_MOE, 3.3e9), (DEEPSEEK, 37e9), (MIXTRAL, 12.9e9)])
def test_a_token_goes_through_as_many_as_was_published(config, active):
    assert shape_of(config, "a model").llm.active_parameters == pytest.approx(active, rel=0.03)


def test_the_shape_of_a_known_model_is_the_same_from_its_file():
    read, known = shape_of(QWEN_VL, "a model"), model("qwen2.5-vl-7b")
    assert read.parameters == known.parameters
    assert read.llm.kv_numbers_per_token(2) == known.llm.kv_numbers_per_token(2)
    assert read.llm.operations_per_pair == known.llm.operations_per_pair
    assert read.encodings["image"].tower == known.encodings["image"].tower
    assert read.max_model_len == known.max_model_len


@pytest.mark.parametrize(
    ("config", "kv_bytes"),
    [(LLAMA_8B, 131_072), (QWEN_MOE, 98_304), (DEEPSEEK, 70_272)],  # DeepSeek-V3's report: 70.272 KB a token
)
def test_kv_bytes_of_a_token(config, kv_bytes):
    assert 2 * shape_of(config, "a model").llm.kv_numbers_per_token() == kv_bytes


def test_each_device_has_the_latent_vector_of_a_token():
    llm = shape_of(DEEPSEEK, "a model").llm
    assert llm.kv_numbers_per_token(8) == 8 * llm.kv_numbers_per_token(1)


def test_windows_hold_a_part_of_long_contexts():
    llm = shape_of(GEMMA_27B, "a model").llm
    assert llm.sliding_layers == 52
    short, long = llm.with_context(1000), llm.with_context(10_240)
    assert short == llm
    assert long.kv_numbers_per_token() == pytest.approx((10 + 52 / 10) / 62 * llm.kv_numbers_per_token())
    assert long.parameters == llm.parameters


def groups(bits, kind="int", activations=None, **more):
    weights = {"num_bits": bits, "type": kind, "group_size": 128}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}, **more}


FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
EIGHT, KV = {"num_bits": 8, "type": "float"}, {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}


@pytest.mark.parametrize(
    ("quantization", "weights", "kv_fp8"),
    [
        ({"quant_method": "fp8"}, "fp8", False),
        ({"quant_method": "awq", "bits": 4}, "int4", False),
        ({"quant_method": "awq", "w_bit": 4}, "int4", False),
        ({"quant_method": "gptq", "bits": 8}, "int8", False),
        ({"quant_method": "auto-round", "bits": 4}, "int4", False),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}}, "int4", False),
        (groups(4), "int4", False),
        (groups(4, "int", {"num_bits": 8, "type": "int"}), "int4", False),  # W4A8
        (groups(4, **KV), "int4", True),
        (groups(8, "int", {"num_bits": 8, "type": "int"}), "int8", False),  # W8A8 of integers
        (groups(8, "float", EIGHT), "fp8", False),
        (groups(8, "float", EIGHT, **KV), "fp8", True),
        (groups(8, "float"), "int8", False),  # converted: as many bytes, and products in bf16
        (groups(4, "float", {"num_bits": 4, "type": "float"}, format="nvfp4-pack-quantized"), "nvfp4", False),
        (groups(4, "float"), "int4", False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", **KV}, "fp8", True),
        ({"quant_method": "modelopt", "quantization": FP8}, "fp8", True),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4"}}, "nvfp4", False),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4", False),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", False),
        ({"quant_method": "mxfp4"}, "mxfp4", False),
        ({}, "bf16", False),
        (None, "bf16", False),
    ],
)  # fmt: skip
def test_precision_follows_the_checkpoint(quantization, weights, kv_fp8):
    found = shape_of(LLAMA_8B | {"quantization_config": quantization}, "a model").precision
    assert found == Precision(WeightFormat(weights), kv_fp8)
    if quantization:
        assert shape_of(LLAMA_8B | {"compression_config": quantization}, "a model").precision == found


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "hqq"}, "the quant_method 'hqq' is not known"),
        ({"quant_method": "gptq", "bits": 3}, "weights of 3 bits are not known"),
        ({"quant_method": "gptq"}, "the field 'bits' is missing"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "the quant_algo 'MIXED_PRECISION' is not known",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}}, "'W4A16' has no table of its"),
        (groups(4) | {"config_groups": groups(4)["config_groups"] | {"b": {"weights": {"num_bits": 8}}}}, "int4, int8"),
    ],
)
def test_the_users_word_counts_for_formats_that_are_not_known(quantization, said):
    config = LLAMA_8B | {"quantization_config": quantization}
    with pytest.raises(
        ConfigError, match=f"quantization_config.*{said}.*: name the format of the weights with `plan --w"
    ):
        shape_of(config, "a model")
    found = shape_of(config, "a model", weights=WeightFormat.NVFP4)
    assert found.precision == Precision(WeightFormat.NVFP4)
    # the checkpoint tells what it knows: the user's word replaces it only where a command is made
    assert shape_of(DEEPSEEK, "a model", weights=WeightFormat.BF16).precision == Precision(WeightFormat.FP8)


def test_mxfp4_is_of_routed_experts_alone():
    shape = shape_of(MIXTRAL, "a model")
    outside = shape.parameters - shape.llm.expert_parameters
    expected = 2 * outside + (0.5 + 1 / 32) * shape.llm.expert_parameters
    assert shape.weight_bytes(WeightFormat.MXFP4) == pytest.approx(expected)
    dense = shape_of(LLAMA_8B, "a model")
    assert dense.weight_bytes(WeightFormat.MXFP4) == dense.weight_bytes(WeightFormat.BF16)
    slow, fast = (
        RooflineCosts(shape, H200, precision=Precision(one)) for one in (WeightFormat.BF16, WeightFormat.MXFP4)
    )
    fixed = Efficiency().step_seconds
    head = shape.llm.head_parameters
    reading = [one.step_seconds(1, 0, 0, 0.0) - fixed for one in (slow, fast)]
    active = shape.llm.expert_parameters * shape.llm.expert_share
    rest = shape.llm.stored_parameters - shape.llm.expert_parameters + head
    assert reading[1] / reading[0] == pytest.approx((2 * rest + (0.5 + 1 / 32) * active) / (2 * rest + 2 * active))


def test_fewer_bits_leave_more_memory_and_read_faster():
    shape = shape_of(LLAMA_8B, "a model")
    costs = {one: RooflineCosts(shape, H200, precision=Precision(one)) for one in WeightFormat}
    bf16, fp8, int4 = (costs[one] for one in (WeightFormat.BF16, WeightFormat.FP8, WeightFormat.INT4))
    decode = [one.step_seconds(1, 0, 0, 0.0) - Efficiency().step_seconds for one in (bf16, fp8, int4)]
    assert decode[0] > 1.7 * decode[1] > 1.7 * 1.4 * decode[2]
    assert bf16.kv_tokens < fp8.kv_tokens < int4.kv_tokens
    # a long prompt is operations: eight bits have a peak of their own, four do not
    prompt = [one.step_seconds(0, 0, 8192, 0.0) for one in (bf16, fp8, int4)]
    assert prompt[0] == prompt[2] > 1.8 * prompt[1]
    halved = RooflineCosts(shape, H200, precision=Precision(kv_fp8=True))
    assert halved.kv_tokens == pytest.approx(2 * bf16.kv_tokens, abs=1)


def test_an_a100_converts_fp8():
    shape, a100 = shape_of(LLAMA_8B, "a model"), device("a100-80gb")
    prompt = [
        RooflineCosts(shape, a100, precision=Precision(one)).step_seconds(0, 0, 8192, 0.0) for one in WeightFormat
    ]
    assert prompt[0] == prompt[1] == prompt[2]


def test_few_tokens_read_few_experts():
    shape = shape_of(QWEN_MOE, "a model")
    costs, fixed = RooflineCosts(shape, H200), Efficiency().step_seconds
    one, many = (costs.step_seconds(number, 0, 0, 0.0) - fixed for number in (1, 64))
    dense = 2 * (shape.parameters - shape.llm.head_parameters) / (H200.bandwidth_bytes_per_second * 0.8)
    assert one == pytest.approx(dense * shape.llm.active_parameters / shape.parameters, rel=0.1)
    assert many == pytest.approx(dense, rel=0.05)
    assert costs.decode_line(64, 0)[0] == pytest.approx(many + fixed)


def test_whole_experts_are_uneven():
    shape = shape_of(QWEN_MOE, "a model")
    split, whole = (RooflineCosts(shape, H200, Parallel(4, experts=on)) for on in (False, True))
    for load in ((64, 0, 0, 0.0), (0, 0, 8192, 0.0)):
        assert split.step_seconds(*load) < whole.step_seconds(*load) < 1.25 * split.step_seconds(*load)
    with pytest.raises(ConfigError, match="has no routed experts"):
        RooflineCosts(shape_of(LLAMA_8B, "a model"), H200, Parallel(2, experts=True))


def test_stages_of_a_pipeline_share_weights_and_work():
    shape = shape_of(DEEPSEEK, "a model")
    with pytest.raises(ConfigError, match="does not fit on 4 x 'h200-141gb'"):
        RooflineCosts(shape, H200, 4)
    two = RooflineCosts(shape, H200, Parallel(4, 2))
    eight = RooflineCosts(shape, H200, 8)
    # the latent vector is on 4 devices of each stage, not on 8
    assert two.kv_tokens == pytest.approx(2 * eight.kv_tokens, abs=2)
    one, hop = Efficiency().step_seconds, Efficiency().hop_seconds
    llama = shape_of(LLAMA_8B, "a model")
    whole, piped = RooflineCosts(llama, H200), RooflineCosts(llama, H200, Parallel(1, 2))
    # alone, a request goes through both stages, one after the other
    assert piped.step_seconds(1, 1000, 0, 0.0) == pytest.approx(whole.step_seconds(1, 1000, 0, 0.0) + hop, rel=1e-3)
    # two halves of the requests are in flight at once
    assert piped.step_seconds(64, 64_000, 0, 0.0) == pytest.approx(
        whole.step_seconds(32, 32_000, 0, 0.0) + hop, rel=1e-3
    )
    prompt = piped.step_seconds(0, 0, 8192, 8192**2 / 2) - one
    assert prompt == pytest.approx((whole.step_seconds(0, 0, 8192, 8192**2 / 2) - one) / 2, rel=0.02)
    fixed, slope, limit = piped.decode_line(64, 64_000)
    assert fixed + slope * 64_000 == pytest.approx(piped.step_seconds(64, 64_000, 0, 0.0))
    assert limit >= 64_000


def test_a_missing_field_is_named(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in LLAMA_8B.items() if key != "vocab_size"}))
    with pytest.raises(ConfigError, match=r"config.json: the field 'vocab_size' is missing"):
        read_config(tmp_path)
    file.write_text(json.dumps(LLAMA_8B | {"hidden_size": "4096"}))
    with pytest.raises(
        ConfigError, match="the field 'hidden_size' must be a whole number above 0, got '4096': correct"
    ):
        read_config(file)
    file.write_text(json.dumps({key: value for key, value in LLAMA_8B.items() if key != "model_type"}))
    with pytest.raises(ConfigError, match="the field 'model_type' is missing"):
        read_config(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_config(file)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "'layer_types' has 'linear_attention'"),
        ({"layer_types": ["full_attention"] * 31}, "'layer_types' must have 'num_hidden_layers' entries, 32, got 31"),
        ({"layer_types": 5}, "the field 'layer_types' must be a list of strings, got 5"),
        ({"head_dim": 0}, "the field 'head_dim' must be a whole number above 0, got 0"),
        ({"vocab_size": 0}, "the field 'vocab_size' must be a whole number above 0, got 0"),
        ({"max_position_embeddings": 0}, "the field 'max_position_embeddings' must be a whole number above 0"),
        ({"num_key_value_heads": 0}, "the field 'num_key_value_heads' must be a whole number above 0, got 0"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' must divide 'num_attention_heads', 32, got 3"),
        ({"hidden_size": 4100}, "'hidden_size', 4100, must be a multiple of 'num_attention_heads', 32, or 'head_dim'"),
        ({"tie_word_embeddings": "false"}, "the field 'tie_word_embeddings' must be true or false, got 'false'"),
    ],
)
def test_what_is_not_understood_is_refused(more, said):
    with pytest.raises(ConfigError, match=said):
        shape_of(LLAMA_8B | more, "a model")


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (
            MIXTRAL,
            {"num_experts_per_tok": 9},
            "'num_experts_per_tok' must be from 1 to the number of experts, 8, got 9",
        ),
        (QWEN_MOE, {"mlp_only_layers": 3}, "'mlp_only_layers' must be a list of whole numbers of 0 or more, got 3"),
        (
            GEMMA_27B["text_config"],
            {"sliding_window_pattern": 0},
            "'sliding_window_pattern' must be a whole number abo",
        ),
    ],
)
def test_wrong_fields_of_a_family_are_named(config, more, said):
    sizes = {"vocab_size": 1000, "num_attention_heads": 32}
    with pytest.raises(ConfigError, match=said):
        shape_of(sizes | config | more, "a model")


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (QWEN_VL, {"deepstack_visual_indexes": 3}, "'deepstack_visual_indexes' must be a list of whole numbers"),
        (QWEN_VL, {"fullatt_block_indexes": 7}, "'fullatt_block_indexes' must be a list of whole numbers"),
        (QWEN_VL, {"patch_size": 0}, "'patch_size' must be a whole number above 0, got 0"),
        (GEMMA_27B, {"image_size": [448, 336]}, "'image_size' must be a whole number above 0, or two equal ones"),
        (GEMMA_27B, {"image_size": 7}, "'image_size', 7, must be at least 'patch_size', 14"),
    ],
)
def test_wrong_fields_of_a_tower_are_named(config, more, said):
    with pytest.raises(ConfigError, match=f"vision_config: (the field )?{said}"):
        shape_of(config | {"vision_config": config["vision_config"] | more}, "a model")


def test_a_wrong_ratio_of_tiles_is_named():
    internvl = {
        "model_type": "internvl", "text_config": {"model_type": "qwen2"}, "vision_config": {"image_size": [448, 448]},
    }  # fmt: skip
    assert shape_of(internvl, "a model").encodings["image"].sequence_embeds == 256
    with pytest.raises(ConfigError, match=r"'downsample_ratio' must be a number from 0\.001 to 1, got 'half'"):
        shape_of(internvl | {"downsample_ratio": "half"}, "a model")
    with pytest.raises(ConfigError, match="'downsample_ratio' leaves no embedding of 1024 patches"):
        shape_of(internvl | {"downsample_ratio": 0.01}, "a model")


def test_what_the_outer_table_says_of_tied_embeddings_counts():
    tied = {"model_type": "llava", "text_config": {"model_type": "llama", "tie_word_embeddings": False}}
    assert not shape_of(tied, "a model").llm.tied
    assert shape_of(tied | {"tie_word_embeddings": True}, "a model").llm.tied


def test_a_name_comes_from_the_folder(tmp_path):
    folder = tmp_path / "Llama-3.1-8B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    assert read_config(folder).name == "Llama-3.1-8B"
    assert read_config(folder, "meta-llama/Llama-3.1-8B").name == "meta-llama/Llama-3.1-8B"

"""List what a plan may choose from: layouts that fit, flags that vLLM takes, options that the product takes."""

from dataclasses import replace

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.config_json import shape_of
from vllm_omni_sched.sim.costs.configured.decoder import Experts
from vllm_omni_sched.sim.costs.hardware import DEVICES, device
from vllm_omni_sched.sim.costs.models import MODELS, LlmShape, ModelShape, Precision, WeightFormat, model
from vllm_omni_sched.sim.costs.roofline import Parallel
from vllm_omni_sched.sim.plan.systems import (
    PRICE_SOURCES,
    PRICES,
    Choices,
    Flags,
    Layout,
    Prefill,
    System,
    command,
    offer,
    option_values,
    room_of,
    shipped,
    with_context,
)

SHAPE = model("qwen2.5-vl-7b")
ONE = Layout("h100-80gb", Parallel(), 3.0)
TWO = Layout("h100-80gb", Parallel(2), 3.0)


def choices(items=False, **more):
    return Choices(SHAPE, "Qwen/Qwen2.5-VL-7B-Instruct", (ONE, TWO), 8, items, **more)


def splits(shape, *kinds, precision=Precision(), most=64):  # noqa: B008 (frozen)
    return {(one.device, one.parallel) for one in offer(shape, kinds, PRICES, precision, most).layouts}


def test_every_device_has_a_price_and_its_source():
    assert set(PRICES) == set(PRICE_SOURCES) == set(DEVICES)
    assert all(source.text for source in PRICE_SOURCES.values())


def test_heads_are_divided_and_memory_suffices():
    # 28 heads cannot be divided by 8
    assert splits(SHAPE, "h100-80gb") == {("h100-80gb", Parallel(number)) for number in (1, 2, 4)}
    large = model("qwen2.5-vl-72b")
    assert splits(large, "h100-80gb", "a100-40gb") == {
        ("h100-80gb", Parallel(4)), ("h100-80gb", Parallel(8)), ("a100-40gb", Parallel(8)),
    }  # fmt: skip
    assert ("h100-80gb", Parallel(2)) in splits(large, "h100-80gb", precision=Precision(WeightFormat.FP8))
    assert splits(SHAPE, "h100-80gb", most=2) == {("h100-80gb", Parallel(number)) for number in (1, 2)}


def test_a_pipeline_only_where_a_node_does_not_suffice():
    huge = ModelShape("huge", LlmShape(120, 16384, 128, 8, 53248, 128256), {}, 0, SHAPE.source)
    found = splits(huge, "a100-80gb")
    assert found
    assert all(split.pipeline > 1 and split.tensor == 8 for _, split in found)


def test_what_does_not_fit_or_has_no_price_is_an_error():
    with pytest.raises(ConfigError, match="does not fit on 1 x 'a6000'"):
        offer(model("qwen2.5-vl-72b"), ["a6000"], PRICES, Precision(), 2)
    with pytest.raises(
        ConfigError, match="the price of device 'a6000' is not known: set it with --price a6000=DOLLARS"
    ):
        offer(SHAPE, ["a6000"], {}, Precision(), 8)


def test_flags_as_vllm_ships_them():
    found = {name: shipped(device(name)) for name in ("a100-80gb", "h100-80gb", "b200-180gb", "l40s")}
    assert [(one.max_num_batched_tokens, one.max_num_seqs) for one in found.values()] == [
        (2048, 256), (8192, 1024), (16384, 1024), (2048, 256),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "flags", "options", "items", "accepted"),
    [
        (ONE, Flags(), None, False, True),
        (ONE, Flags(512, 1024), None, False, False),  # vLLM does not start
        (ONE, Flags(), {"encode_ahead": True}, True, True),
        (TWO, Flags(), {"encode_ahead": True}, True, False),  # the lane needs one worker on GPUs
        (ONE, Flags(), {"encode_ahead": True, "encode_rounds": True}, True, False),
        (ONE, Flags(), {"no_such_option": 1}, False, False),
    ],
)
def test_what_a_server_refuses_is_not_offered(layout, flags, options, items, accepted):
    assert choices(items).accepted(System(layout, flags, options)) is accepted


@pytest.mark.parametrize("items", [False, True])
def test_every_option_that_is_searched_is_one(items):
    for values in option_values(2.0, 0.1, items).values():
        assert all(choices(items).accepted(System(ONE, Flags(), one)) for one in values)


def test_the_command_has_what_the_plan_has():
    text = command(choices(), System(TWO, Flags(2048, 64, 0.95, False)))
    assert text == (
        "vllm serve Qwen/Qwen2.5-VL-7B-Instruct --tensor-parallel-size 2 --max-num-batched-tokens 2048 "
        "--max-num-seqs 64 --gpu-memory-utilization 0.95 --no-enable-prefix-caching"
    )
    form = Precision(WeightFormat.FP8, kv_fp8=True)
    experts = replace(LLAMA, llm=replace(LLAMA.llm, experts=Experts(32, 8, 2, 14336)))
    ours = command(
        replace(choices(precision=form), shape=experts),
        System(replace(TWO, parallel=Parallel(8, 2, True)), Flags(), {"batch_max": 9}),
    )
    assert "--pipeline-parallel-size 2 --enable-expert-parallel --quantization fp8 --kv-cache-dtype fp8" in ours
    assert ours.endswith(
        "--scheduler-cls vllm_omni_sched.OmniScheduler "
        """--additional-config '{"omni_sched": {"expert": {"batch_max": 9}}}'"""
    )


def test_twice_a_resource_is_faster_or_more():
    kind, flags = choices(), Flags()
    costs = kind.costs(TWO, flags)
    load = {"compute": (0, 0, 8192, 3e7), "memory bandwidth": (8, 80_000, 0, 0.0), "host": (1, 10, 0, 0.0),
            "links between devices": (0, 0, 8192, 3e7)}  # fmt: skip
    for name, step in load.items():
        assert kind.costs(TWO, flags, name).step_seconds(*step) < costs.step_seconds(*step)
    assert kind.limits(flags, costs, "KV memory").kv_tokens == 2 * kind.limits(flags, costs).kv_tokens


LLAMA = shape_of(
    {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    "meta-llama/Llama-3.1-8B",
)  # fmt: skip
GEMMA = shape_of(
    {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 10240, "sliding_window": 1024,
        "max_position_embeddings": 131072, "vocab_size": 262208,
    },
    "google/gemma-3-4b",
)  # fmt: skip


@pytest.mark.parametrize(
    ("device_name", "longest", "length"),
    [
        # 129,237 tokens are predicted to fit, fewer than the model's 131,072: vLLM would not start
        ("a100-40gb", 1_000, 115_712),
        ("a100-40gb", 120_000, 120_000),
        ("a100-80gb", 1_000, None),
    ],
)
def test_the_context_is_what_the_kv_cache_holds(device_name, longest, length):
    layout = Layout(device_name, Parallel(), 1.0)
    found = Choices(LLAMA, "MODEL", (layout,), 1, False, longest=longest)
    assert found.max_model_len(layout, Flags()) == length
    said = command(found, System(layout, Flags()))
    assert (f" --max-model-len {length} " in said) if length else ("--max-model-len" not in said)
    assert found.accepted(System(layout, Flags()))


def test_a_layout_without_room_for_the_longest_request_is_refused_with_the_reason():
    found = offer(LLAMA, ["a100-40gb", "a100-80gb"], PRICES, Precision(), 2, longest=130_000)
    assert [(one.device, one.parallel.tensor) for one in found.layouts] == [
        ("a100-40gb", 2), ("a100-80gb", 1), ("a100-80gb", 2),
    ]  # fmt: skip
    assert found.refused == ("1 x a100-40gb has room for a request of 129,216 tokens",)
    with pytest.raises(
        ConfigError, match="the longest request has 130,000 tokens with its answer, but the KV cache of"
    ):
        offer(LLAMA, ["a100-40gb"], PRICES, Precision(), 1, longest=130_000)
    one = Layout("a100-40gb", Parallel(), 1.0)
    tight = Choices(LLAMA, "MODEL", (one,), 1, False, longest=130_000)
    assert not tight.accepted(System(one, Flags()))
    assert tight.accepted(System(one, Flags(gpu_memory_utilization=0.95)))
    assert not tight.accepted(System(one, Flags(gpu_memory_utilization=0.95), prefill=Prefill(one, Flags())))


def test_a_window_holds_itself_and_the_steps_in_flight():
    """29 of 34 layers hold at most 1,024 tokens and two steps: one long request has more room than the mean."""
    shape = with_context(GEMMA, 2_000)
    flags = Flags(2048, 256)
    tokens = 100_000
    room = room_of(shape, tokens, Parallel(), flags)
    memory = (tokens // 16 - 1) * 16 * (5 + 29 * 1024 / 2000)
    assert 5 * room + 29 * (1024 + 2 * 2048) <= memory < 5 * (room + 16) + 29 * (1024 + 2 * 2048)
    assert room > tokens
    assert room_of(GEMMA, 0, Parallel(), flags) == 0


@pytest.mark.parametrize("name", MODELS)
def test_known_models_are_served_by_their_name_on_the_hub(name):
    shape = MODELS[name]
    assert shape.hub in shape.source.text
    four = Layout("h200-141gb", Parallel(4), 4.0)
    said = command(Choices(shape, shape.hub, (four,), 8, False), System(four, Flags()))
    assert said.startswith(f"vllm serve {shape.hub} ")
    assert ("--trust-remote-code" in said) is shape.hub.startswith("OpenGVLab/")
    assert "--trust-remote-code" not in command(Choices(shape, "a fork", (four,), 8, False), System(four, Flags()))


@pytest.mark.parametrize(
    ("checkpoint", "served", "flag"),
    [
        ("bf16", "fp8", True),
        ("bf16", "int4", False),
        ("fp8", "bf16", False),
        ("int4", "fp8", False),
        ("fp8", "fp8", False),
    ],
)
def test_only_what_vllm_makes_of_a_checkpoint_is_a_flag(checkpoint, served, flag):
    shape = replace(LLAMA, precision=Precision(WeightFormat(checkpoint)))
    one = Choices(shape, "MODEL", (ONE,), 8, False, Precision(WeightFormat(served)))
    assert ("--quantization" in command(one, System(ONE, Flags()))) is flag

"""List what a plan may choose from: layouts that fit, flags that vLLM takes, options that the product takes."""

from dataclasses import replace

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.hardware import DEVICES, device
from vllm_omni_sched.sim.costs.models import LlmShape, ModelShape, Precision, WeightFormat, model
from vllm_omni_sched.sim.costs.roofline import Parallel
from vllm_omni_sched.sim.plan.systems import (
    PRICE_SOURCES,
    PRICES,
    Choices,
    Flags,
    Layout,
    System,
    command,
    layouts,
    option_values,
    shipped,
)

SHAPE = model("qwen2.5-vl-7b")
ONE = Layout("h100-80gb", Parallel(), 3.0)
TWO = Layout("h100-80gb", Parallel(2), 3.0)


def choices(items=False, **more):
    return Choices(SHAPE, "Qwen/Qwen2.5-VL-7B-Instruct", (ONE, TWO), 8, items, **more)


def splits(shape, *kinds, precision=Precision(), most=64):  # noqa: B008 (frozen)
    return {(one.device, one.parallel) for one in layouts(shape, kinds, PRICES, precision, most)}


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
        layouts(model("qwen2.5-vl-72b"), ["a6000"], PRICES, Precision(), 2)
    with pytest.raises(
        ConfigError, match="the price of device 'a6000' is not known: set it with --price a6000=DOLLARS"
    ):
        layouts(SHAPE, ["a6000"], {}, Precision(), 8)


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
    ours = command(
        choices(precision=form), System(replace(TWO, parallel=Parallel(8, 2, True)), Flags(), {"batch_max": 9})
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

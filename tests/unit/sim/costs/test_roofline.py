"""The roofline against published times, and its rules."""

from dataclasses import replace

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.hardware import device
from vllm_omni_sched.sim.costs.models import LlmShape, ModelShape, model
from vllm_omni_sched.sim.costs.roofline import Efficiency, RooflineCosts
from vllm_omni_sched.sim.work import Item, Request

A100 = device("a100-80gb")
LLAMA_7B = ModelShape("llama-2-7b", LlmShape(32, 4096, 32, 32, 11008, 32000), {}, 6_738_415_616)
LLAMA_70B = ModelShape("llama-2-70b", LlmShape(80, 8192, 64, 8, 28672, 32000), {}, 68_976_648_192)


def pairs(tokens):
    return tokens * (tokens + 1) / 2


@pytest.fixture(scope="module")
def qwen():
    return RooflineCosts(model("qwen2.5-vl-7b"), A100)


@pytest.mark.parametrize(("devices", "tokens_per_second"), [(1, 104.9), (2, 168.84), (4, 254.02), (8, 328.43)])
def test_decoding_alone_as_gpt_fast_measured_it(devices, tokens_per_second):
    """gpt-fast's README has Llama-2-7B, A100 80 GB with NVLink, batch 1. Two of our constants are fitted to it."""
    step = RooflineCosts(LLAMA_7B, A100, devices).step_seconds(1, 100, 0, 0.0)
    assert 1 / step == pytest.approx(tokens_per_second, rel=0.03)


@pytest.mark.parametrize(("shape", "devices", "seconds"), [(LLAMA_7B, 1, 0.133), (LLAMA_70B, 4, 0.377)])
def test_a_prompt_as_tensorrt_llm_measured_it(shape, devices, seconds):
    """Its performance page, v0.5, has the first token after 2,048, A100 80 GB, fp16. Nothing is fitted to it."""
    step = RooflineCosts(shape, A100, devices).step_seconds(0, 0, 2048, pairs(2048))
    assert step == pytest.approx(seconds, rel=0.15)


def test_shapes_of_llama_give_its_parameters():
    for shape in (LLAMA_7B, LLAMA_70B):
        assert shape.parameters == shape.published_parameters


def test_a_picture_takes_tens_of_milliseconds(qwen):
    assert 0.02 < qwen.encode_seconds("image", 1000) < 0.1


def test_decoding_is_bound_by_memory_and_a_prompt_by_operations(qwen):
    one, many = qwen.step_seconds(1, 1000, 0, 0.0), qwen.step_seconds(32, 32_000, 0, 0.0)
    assert many < 1.2 * one
    short, long = qwen.step_seconds(0, 0, 2048, 0.0), qwen.step_seconds(0, 0, 4096, 0.0)
    fixed = Efficiency().step_seconds
    assert long - fixed == pytest.approx(2 * (short - fixed))


def test_reading_the_context_takes_its_time(qwen):
    """The context is 1 GB of KV cache, read at 0.8 of 2,039 GB/s."""
    tokens = 10**9 / 57_344
    more = qwen.step_seconds(8, 20_000 + round(tokens), 0, 0.0) - qwen.step_seconds(8, 20_000, 0, 0.0)
    assert more == pytest.approx(1 / (2039 * 0.8), rel=1e-3)


def test_all_operations_of_a_step_count(qwen):
    """Beside a long prompt, a decoding request needs the output matrix, and each token that it reads is a pair."""
    peak = 312e12 * 0.6
    decodes, prompt = qwen.step_seconds(64, 0, 4096, 0.0), qwen.step_seconds(0, 0, 4160, 0.0)
    assert decodes - prompt == pytest.approx(64 * 2 * 152_064 * 3584 / peak)
    read, paired = qwen.step_seconds(64, 10**6, 4096, 0.0), qwen.step_seconds(64, 0, 4096, 1e6)
    assert read == pytest.approx(paired)
    assert read - decodes == pytest.approx(1e6 * 4 * 28 * 3584 / peak)


def test_a_step_without_tokens_takes_no_time(qwen):
    assert qwen.step_seconds(0, 0, 0, 0.0) == 0.0


def test_operations_follow_the_share_and_reading_only_below_saturation(qwen):
    fixed = Efficiency().step_seconds
    prompt, decode = (0, 0, 4096, pairs(4096)), (4, 4000, 0, 0.0)
    for share in (0.75, 0.5, 0.25):
        assert qwen.step_seconds(*prompt, share) - fixed == pytest.approx((qwen.step_seconds(*prompt) - fixed) / share)
    enough = Efficiency().saturating_share
    assert qwen.step_seconds(*decode, enough) == qwen.step_seconds(*decode, 0.5) == qwen.step_seconds(*decode)
    assert qwen.step_seconds(*decode, enough / 2) - fixed == pytest.approx(2 * (qwen.step_seconds(*decode) - fixed))


def test_encoding_follows_the_share_and_the_lane_is_no_different(qwen):
    launches = Efficiency().encode_seconds
    whole, half = (qwen.encode_seconds("image", 1000, 1, share) - launches for share in (1.0, 0.5))
    assert half == pytest.approx(2 * whole)
    assert qwen.lane_seconds("image", 1000, 1, 0.5) == qwen.encode_seconds("image", 1000, 1, 0.5)


def test_a_lane_and_the_steps_beside_it_have_the_device_once(qwen):
    fair = Efficiency().lane_share
    for share in (0.1, 0.3, fair, 0.8, 1.0):
        lane = min(share, fair)
        assert qwen.in_lane(share) == pytest.approx(1 - lane)
        beside = qwen.lane_seconds("image", 1000, 1, share, beside=True)
        assert beside == qwen.encode_seconds("image", 1000, 1, lane)
    assert qwen.lane_seconds("image", 1000, 1, 1.0) == qwen.encode_seconds("image", 1000)


def test_one_large_picture_costs_more_than_many_small_ones(qwen):
    assert qwen.encode_seconds("image", 4000, 1) > qwen.encode_seconds("image", 4000, 4)


def test_frames_of_a_video_do_not_see_each_other(qwen):
    base = Efficiency().encode_seconds
    one, ten = (qwen.encode_seconds("video", 768 * n) - base for n in (1, 10))
    assert ten == pytest.approx(10 * one)
    one, ten = (qwen.encode_seconds("image", 768 * n) - base for n in (1, 10))
    assert ten > 12 * one


def test_room_for_kv(qwen):
    """The room is 0.9 of 80 GB, without 3 GB and 16.6 GB of weights, at 57,344 bytes a token."""
    assert qwen.kv_tokens == pytest.approx((72e9 - 3e9 - 16.584e9) / 57_344, rel=1e-4)
    assert RooflineCosts(model("qwen2.5-vl-72b"), A100, 4).kv_tokens > 100_000


@pytest.mark.parametrize(
    ("name", "kind", "devices", "says"),
    [
        ("qwen2.5-vl-72b", "a100-80gb", 2, "does not fit on 2 x 'a100-80gb'.*use 4 devices, a larger device"),
        ("internvl3-38b", "a100-40gb", 1, "use 4 devices"),
        ("qwen2.5-vl-7b", "a100-80gb", 3, "divide its 28 heads"),
        ("qwen2.5-vl-7b", "a100-80gb", 0, "divide its 28 heads"),
    ],
)
def test_what_cannot_be_is_refused_with_the_fix(name, kind, devices, says):
    with pytest.raises(ConfigError, match=f"model '{name}'.*{says}"):
        RooflineCosts(model(name), device(kind), devices)


def test_the_bytes_that_are_missing():
    with pytest.raises(ConfigError, match="8,821,879,808 bytes are missing"):
        RooflineCosts(model("qwen2.5-vl-72b"), A100, 2)


def test_no_number_of_devices_helps_where_none_is_left_for_weights():
    with pytest.raises(ConfigError, match="; use a larger device or a smaller model"):
        RooflineCosts(model("qwen2.5-vl-7b"), A100, 1, Efficiency(activation_bytes=80e9))


def test_the_fix_works():
    assert RooflineCosts(model("internvl3-38b"), device("a100-40gb"), 4).kv_tokens > 0


def test_without_nvlink_reductions_go_over_pcie():
    slow, fast = (
        RooflineCosts(model("qwen2.5-vl-7b"), replace(A100, nvlink_bytes_per_second=nvlink), 2)
        for nvlink in (0.0, 3e11)
    )
    link = 2 * 28 * 1 * 2 * 3584 * 4096  # two reductions in each layer, each byte is sent once
    more = slow.step_seconds(0, 0, 4096, 0.0) - fast.step_seconds(0, 0, 4096, 0.0)
    assert more == pytest.approx(link / 32e9 - link / 3e11)


def test_the_front_end_prepares_every_item(qwen):
    use = Efficiency()
    items = (Item("image", 1369, 1), Item("image", 1369, 2))
    seconds = qwen.frontend_seconds(Request(0, 0.0, 500, 10, items))
    assert seconds == pytest.approx(use.request_seconds + 500 * use.text_token_seconds + 2 * 18.3e-3, rel=0.05)
    assert qwen.answer_seconds == use.answer_seconds


def test_a_modality_without_a_tower(qwen):
    says = "model 'qwen2.5-vl-7b' has no encoder for modality 'audio': it has encoders for image, video; choose"
    with pytest.raises(ConfigError, match=says):
        qwen.encode_seconds("audio", 10)
    with pytest.raises(ConfigError, match=says):
        qwen.frontend_seconds(Request(0, 0.0, 5, 1, (Item("audio", 10, 1),)))
    assert RooflineCosts(model("qwen2.5-omni-7b"), A100).encode_seconds("audio", 250) < 0.02


@pytest.mark.parametrize(
    ("name", "value"),
    [("compute", 0.0), ("bandwidth", 1.1), ("step_seconds", -1.0), ("activation_bytes", float("inf"))],
)
def test_an_efficiency_out_of_range(name, value):
    with pytest.raises(ConfigError, match=f"efficiency '{name}' must be"):
        Efficiency(**{name: value})


def test_items_of_a_text_model_are_refused_with_the_fix():
    costs = RooflineCosts(LLAMA_7B, A100)
    with pytest.raises(ConfigError) as error:
        costs.encode_seconds("image", 5)
    assert str(error.value) == (
        "model 'llama-2-7b' has no encoder for modality 'image': it has none, and takes text alone; choose a model "
        "that has one, or a workload without such items"
    )

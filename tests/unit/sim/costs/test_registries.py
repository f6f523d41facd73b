"""Devices and models by name."""

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.hardware import device
from vllm_omni_sched.sim.costs.models import MODELS, model


@pytest.mark.parametrize("name", MODELS)
def test_parameters_follow_from_the_shape(name):
    shape = MODELS[name]
    assert shape.parameters == pytest.approx(shape.published_parameters, rel=0.003)


def test_a_tower_counts_once():
    shape = model("qwen2.5-vl-7b")
    towers = shape.parameters - shape.llm.parameters
    assert shape.encodings["image"].tower == shape.encodings["video"].tower
    assert towers == shape.encodings["image"].tower.parameters == pytest.approx(676_550_144, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "kv_bytes"), [("qwen2.5-vl-7b", 57_344), ("qwen2.5-vl-72b", 327_680), ("llava-1.5-7b", 524_288)]
)
def test_kv_bytes_of_a_token(name, kv_bytes):
    llm = model(name).llm
    assert llm.kv_bytes_per_token() == llm.kv_bytes_per_token(llm.kv_heads) == kv_bytes


def test_a_key_head_is_never_split():
    llm = model("qwen2.5-vl-7b").llm  # 4 key heads
    assert llm.kv_bytes_per_token(14) == 14 / 4 * llm.kv_bytes_per_token(4)


def test_a_window_keeps_attention_short():
    """Only 4 of 32 layers of Qwen2.5-VL see the whole picture; all of InternVL's see a tile."""
    qwen, internvl = (model(name).encodings["image"].tower for name in ("qwen2.5-vl-7b", "internvl3-8b"))
    assert qwen.operations_per_pair == 4 * 4 * 1280 * 16
    assert internvl.operations_per_pair == 4 * 24 * 1024 * 16
    matrices = 32 * (4 * 1280**2 + 3 * 1280 * 3420) + 1176 * 1280
    merger = 5120 * (5120 + 3584)
    windows = 28 * 4 * 1280 * 64
    assert qwen.operations_per_embed == pytest.approx(4 * (2 * matrices + windows) + 2 * merger, rel=1e-3)


@pytest.mark.parametrize(
    ("find", "name", "near"),
    [(device, "a100-80g", "a100-80gb"), (model, "qwen2.5-vl-7", "qwen2.5-vl-7b")],
)
def test_an_unknown_name_gets_the_nearest(find, name, near):
    with pytest.raises(ConfigError, match=f"unknown {find.__name__} '{name}': did you mean '{near}'"):
        find(name)


def test_a_name_that_begins_others_gets_them():
    with pytest.raises(
        ConfigError, match=r"^unknown device 'a100': did you mean 'a100-40gb' or 'a100-80gb'\? known are a100-40gb, "
    ):
        device("a100")

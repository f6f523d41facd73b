"""Which models' M-RoPE positions are continued, and which are computed in full."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.mrope import MODELS, make_model, model_class
from tests.support.mrope_session import QWEN2, make_runner, vllm_config
from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.engine.runners import mrope_models
from vllm_omni_sched.engine.runners.mrope import continues
from vllm_omni_sched.engine.start import check_and_attach


@pytest.mark.parametrize(
    "name",
    [
        "isaac.IsaacForConditionalGeneration",
        "qwen2_5_omni_thinker.Qwen2_5OmniThinkerForConditionalGeneration",
        "qwen3_omni_moe_thinker.Qwen3OmniMoeThinkerForConditionalGeneration",
        "minicpmv4_6.MiniCPMV4_6ForConditionalGeneration",
        "glm4v.GLM4VForCausalLM",
    ],
)
def test_other_models_are_computed_in_full(name):
    model = make_model(name)
    assert make_runner(model).omni.positions is None
    with pytest.raises(ConfigError, match=r"'mrope_append' is 'on' but cannot work: .* not among the models"):
        make_runner(model, mrope_append="on")


def test_every_model_that_was_read_is_recognised_in_this_vllm():
    read = {name for name in MODELS if mrope_models.why_recomputed(make_model(name)) is None}
    assert read == set(MODELS)
    assert set(mrope_models.VERIFIED) <= read


def _subclass(**functions: Any) -> Any:
    model = make_model(QWEN2)
    model.__class__ = type("Fork", (model_class(QWEN2),), functions)
    return model


def _patched(monkeypatch: pytest.MonkeyPatch) -> Any:
    original = model_class(QWEN2).iter_mm_grid_thw

    @functools.wraps(original)
    def wrapper(*args: Any) -> Any:
        return original(*args)

    monkeypatch.setattr(model_class(QWEN2), "iter_mm_grid_thw", wrapper)
    return make_model(QWEN2)


def _own(self: Any, *args: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda _: _subclass(), None),
        (lambda _: _subclass(iter_mm_grid_thw=_own), "Fork has a iter_mm_grid_thw of its own"),
        (lambda _: _subclass(get_mrope_input_positions=_own), "not among the models"),
        (_patched, "differs from the versions that were verified"),
        (lambda _: torch.nn.Linear(1, 1), "computes no M-RoPE positions"),
    ],
)
def test_a_changed_function_is_another_function(monkeypatch, make, reason):
    found = mrope_models.why_recomputed(make(monkeypatch))
    assert (found is None) if reason is None else (reason in found)


@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({}, {}, None),
        ({"uses_mrope": False}, {}, "the model has no M-RoPE"),
        ({"pruning": True}, {}, "video pruning"),
        ({}, {"session_delta": "off"}, "sessions reach the workers in full"),
    ],
)
def test_on_refuses_where_auto_recomputes(changed, options, reason):
    config, model = vllm_config(**changed), make_model(QWEN2)
    assert not continues(OmniSchedConfig(mrope_append="off", **options), config, model)
    assert continues(OmniSchedConfig(**options), config, model) is (reason is None)
    if reason is None:
        assert continues(OmniSchedConfig(mrope_append="on", **options), config, model)
    else:
        with pytest.raises(ConfigError, match=reason):
            continues(OmniSchedConfig(mrope_append="on", **options), config, model)


def test_on_is_refused_before_any_engine_starts():
    config = vllm_config(uses_mrope=False)
    config.scheduler_config = SimpleNamespace(scheduler_cls="vllm_omni_sched.OmniScheduler", async_scheduling=True)
    config.device_config = SimpleNamespace(device_type="cpu")
    config.additional_config = {"omni_sched": {"mrope_append": "on"}}
    with pytest.raises(ConfigError, match="the model has no M-RoPE"):
        check_and_attach(config)

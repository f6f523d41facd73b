"""Stages that are no engines, the choice of costs, and the page of the docs."""

from pathlib import Path

import pytest

from vllm_omni_sched.errors import ConfigError
from vllm_omni_sched.sim.costs.base import SourceKind
from vllm_omni_sched.sim.costs.choice import decoder_costs, engine_costs
from vllm_omni_sched.sim.costs.decoders import CoreDecoder, NvdecDecoder
from vllm_omni_sched.sim.costs.hardware import device
from vllm_omni_sched.sim.costs.roofline import RooflineCosts
from vllm_omni_sched.sim.costs.stages import OUTPUT_STAGES, DiffusionCosts
from vllm_omni_sched.sim.work import Request

REQUEST = Request(0, 0.0, 10, 100)


def test_a_picture_as_it_was_measured():
    """Pruna AI, 2025: FLUX.1-dev, 512 x 512, 50 steps, takes 8.71 s on an L40S without optimisations."""
    assert DiffusionCosts("flux.1-dev", device("l40s"), 512, 512, 50).seconds(REQUEST) == pytest.approx(8.71, rel=0.3)


def test_a_picture_grows_with_its_size_its_steps_and_a_negative_prompt():
    h100 = device("h100-80gb")
    base = DiffusionCosts("sd3-medium", h100).seconds(REQUEST)
    assert DiffusionCosts("sd3-medium", h100, steps=56).seconds(REQUEST) == pytest.approx(2 * base)
    assert DiffusionCosts("sd3-medium", h100, guided=True).seconds(REQUEST) == pytest.approx(2 * base)
    assert DiffusionCosts("sd3-medium", h100, 2048, 1024).seconds(REQUEST) > 2 * base * 0.95
    assert DiffusionCosts("flux.1-dev", h100).seconds(REQUEST) > 4 * base
    tokens = (4 * 4096 + 333) / (4096 + 333)
    assert DiffusionCosts("sd3-medium", h100, 2048, 2048).seconds(REQUEST) > 1.2 * tokens * base  # attention is squared
    assert DiffusionCosts("flux.1-dev", h100).source.kind is SourceKind.ROOFLINE


def test_what_is_no_picture():
    with pytest.raises(ConfigError, match=r"unknown diffusion model 'flux-dev': did you mean 'flux\.1-dev'"):
        DiffusionCosts("flux-dev", device("l40s"))
    with pytest.raises(ConfigError, match="must be above 0, got 0, 1024 and 28"):
        DiffusionCosts("flux.1-dev", device("l40s"), width=0)


def test_speech_grows_with_the_answer():
    talker = OUTPUT_STAGES["talker"]
    assert talker.seconds(REQUEST) == pytest.approx(0.02 + 100 * 0.05)
    assert {one.source.kind for one in OUTPUT_STAGES.values()} == {SourceKind.ASSUMED}


def test_the_costs_that_a_scenario_names():
    costs = engine_costs("llm", "a100-80gb", "qwen2.5-vl-32b", devices=2)
    assert isinstance(costs, RooflineCosts)
    assert costs.source.text == "qwen2.5-vl-32b on 2 x a100-80gb"
    assert isinstance(decoder_costs("video", "cpu", "a100-80gb"), CoreDecoder)
    assert isinstance(decoder_costs("video", "nvdec", "a100-80gb"), NvdecDecoder)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({}, "give it either 'model' or 'calibration'"),
        ({"model_name": "qwen2.5-vl-7b", "calibration": Path("x")}, "give it either 'model' or 'calibration'"),
        ({"model_name": "qwen"}, "unknown model 'qwen'"),
        ({"model_name": "qwen2.5-vl-72b"}, "does not fit"),
        ({"calibration": Path("nowhere.json")}, "'nowhere.json' cannot be read: No such file"),
    ],
)
def test_the_stage_is_named(names, says):
    with pytest.raises(ConfigError, match=f"^stage 'llm': .*{says}"):
        engine_costs("llm", "a100-80gb", **names)


def test_unknown_decoders():
    with pytest.raises(ConfigError, match="stage 'video': unknown decoders 'gpu': did you mean 'cpu'"):
        decoder_costs("video", "gpu", "a100-80gb")

"""The costs that a scenario names."""

from pathlib import Path

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.choice import CoreDecoder, NvdecDecoder, decoder_costs, engine_costs
from vllm_omni_sched.sim.costs.roofline import RooflineCosts


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

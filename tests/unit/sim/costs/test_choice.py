"""The costs that a scenario names."""

from pathlib import Path

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.costs.hardware import CoreDecoder, NvdecDecoder, decoder_of
from vllm_omni_sched.sim.costs.roofline import RooflineCosts, engine_costs
from vllm_omni_sched.sim.scenario.stages import VideoStage


def test_the_costs_that_a_scenario_names():
    costs = engine_costs("llm", "a100-80gb", "qwen2.5-vl-32b", devices=2)
    assert isinstance(costs, RooflineCosts)
    assert costs.source.text == "qwen2.5-vl-32b on 2 x a100-80gb"
    assert isinstance(decoder_of(VideoStage(name="video", kind="video"), "a100-80gb"), CoreDecoder)
    engines = VideoStage(name="video", kind="video", decoders="nvdec")
    assert isinstance(decoder_of(engines, "a100-80gb"), NvdecDecoder)
    with pytest.raises(ConfigError, match="stage 'video': no speed of the video engines of 'b200-180gb' is published"):
        decoder_of(engines, "b200-180gb")


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ({"model_name": "qwen"}, "unknown model 'qwen'"),
        ({"model_name": "qwen2.5-vl-72b"}, "does not fit"),
        ({"calibration": Path("nowhere.json")}, "'nowhere.json' cannot be read: No such file"),
    ],
)
def test_the_stage_is_named(names, says):
    with pytest.raises(ConfigError, match=f"^stage 'llm': .*{says}"):
        engine_costs("llm", "a100-80gb", **names)

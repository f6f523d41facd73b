"""The simulated stock decoder on a GPU has vLLM's defaults."""

from vllm.multimodal.video_decoders.base import PYNVVIDEOCODEC_DEFAULT_HW_DECODERS

from vllm_omni_sched.sim.scenario.stages import HW_DECODERS, VideoStage


def test_decoders_at_a_time() -> None:
    stage = VideoStage(name="video", kind="video", decoders="nvdec", collaborative=False)
    assert stage.per_replica == HW_DECODERS == PYNVVIDEOCODEC_DEFAULT_HW_DECODERS

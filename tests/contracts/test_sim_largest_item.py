"""The largest item that the simulator takes a model to have is the one that vLLM finds when it starts."""

from types import SimpleNamespace
from unittest import mock

import pytest
from vllm.model_executor.models.internvl import InternVLProcessingInfo
from vllm.model_executor.models.qwen2_vl import Qwen2VLProcessingInfo
from vllm.v1.core.encoder_cache_manager import compute_mm_encoder_budget

from vllm_omni_sched.sim.cluster import engine_limits
from vllm_omni_sched.sim.costs.models import MODELS
from vllm_omni_sched.sim.scenario.stages import EngineStage

LENGTHS = [4096, 16_384, 32_767, 32_768, 65_536, 114_687, 114_688, 128_000]


def qwen() -> Qwen2VLProcessingInfo:
    """What vLLM knows of Qwen2.5-VL, with the sizes of its preprocessor_config.json."""
    info = object.__new__(Qwen2VLProcessingInfo)
    info.ctx = SimpleNamespace(get_merged_mm_kwargs=lambda given, **_: dict(given))
    vision = SimpleNamespace(patch_size=14, spatial_merge_size=2, temporal_patch_size=2)
    info.get_hf_config = lambda: SimpleNamespace(vision_config=vision)  # type: ignore[method-assign]
    size = {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}
    info.get_image_processor = lambda **_: SimpleNamespace(size=size)  # type: ignore[method-assign]
    return info


def internvl() -> InternVLProcessingInfo:
    """What vLLM knows of InternVL3: 256 embeddings a tile, 12 tiles and a thumbnail."""
    info = object.__new__(InternVLProcessingInfo)
    info.get_hf_processor = lambda **_: SimpleNamespace(image_seq_length=256)  # type: ignore[method-assign]
    info.get_max_image_tokens = lambda: 13 * 256  # type: ignore[method-assign]
    return info


@pytest.mark.parametrize("length", LENGTHS)
def test_qwen(length: int) -> None:
    found = qwen().get_mm_max_tokens_per_item(length, {"image": 1, "video": 1})
    assert MODELS["qwen2.5-vl-7b"].largest_item(length) == max(found.values())


@pytest.mark.parametrize("length", [8192, 16_384, 32_768])
def test_internvl(length: int) -> None:
    frames = internvl().get_num_frames_with_most_features(length, {"image": 1, "video": 1})
    assert MODELS["internvl3-8b"].largest_item(length) == max(13 * 256, frames * 256)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("tokens", [256, 8192, 131_072])
def test_budget_and_cache_are_those_of_vllm(tokens: int, length: int) -> None:
    scheduler = mock.Mock(max_num_batched_tokens=tokens, disable_chunked_mm_input=False)
    scheduler.max_num_encoder_input_tokens = scheduler.encoder_cache_size = tokens  # as vLLM sets both
    found = compute_mm_encoder_budget(scheduler, qwen().get_mm_max_tokens_per_item(length, {"image": 1, "video": 1}))
    stage = EngineStage(
        name="llm", kind="engine", model="qwen2.5-vl-7b", max_num_batched_tokens=tokens, max_model_len=length
    )
    limits = engine_limits(stage, encodes=True, kv_tokens=10**6)
    assert (limits.encoder_budget_embeds, limits.encoder_cache_embeds) == found

"""Hugging Face's video processors on frames that are tensors, as they are on a device, against arrays, as on the host.

torchvision resizes bytes in integers on a CPU, rounded and bounded after each of the two directions, and in floats on a
GPU, rounded once. The second way is taken here, too, by telling it that the first is not available. Beside sharp edges,
where the resized picture goes beyond black and white, the two differ by several levels; anywhere else by one at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.pixel_levels import compare, deviation_of
from vllm_omni_sched.video.on_device import PROCESSORS

pytest.importorskip("torchvision")
from torchvision.transforms.v2.functional import _geometry
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

MADE = {
    "Qwen2VLVideoProcessor": Qwen2VLVideoProcessor(min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 40),
    "Qwen3VLVideoProcessor": Qwen3VLVideoProcessor(
        size={"shortest_edge": 32 * 32 * 4, "longest_edge": 32 * 32 * 200}, do_sample_frames=False
    ),
}


def frames(count: int, height: int, width: int) -> Any:
    y, x = np.mgrid[:height, :width]
    noise = np.random.default_rng(count).integers(0, 64, (count, height, width, 3))
    shade = np.stack([(x * 2 + y) % 192, (y * 3) % 192, (x + y) % 192], -1)
    return (shade + noise).astype(np.uint8)


def test_every_processor_is_checked() -> None:
    assert set(MADE) == PROCESSORS


@pytest.mark.parametrize("name", sorted(MADE))
@pytest.mark.parametrize("size", [(4, 90, 160), (5, 333, 250), (2, 640, 360)])
def test_a_tensor_gives_what_an_array_gives(
    name: str, size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor, video = MADE[name], frames(*size)
    from_host = processor([video], return_tensors="pt", do_sample_frames=False)
    from_tensor = processor([torch.from_numpy(video)], return_tensors="pt", do_sample_frames=False)
    assert torch.equal(from_host["pixel_values_videos"], from_tensor["pixel_values_videos"])
    monkeypatch.setattr(_geometry, "_do_native_uint8_resize_on_cpu", lambda interpolation: False)
    as_on_device = processor([torch.from_numpy(video)], return_tensors="pt", do_sample_frames=False)
    assert torch.equal(from_host["video_grid_thw"], as_on_device["video_grid_thw"])
    levels = compare(as_on_device["pixel_values_videos"], from_host["pixel_values_videos"], deviation_of(processor))
    assert levels.within_tolerance(), levels

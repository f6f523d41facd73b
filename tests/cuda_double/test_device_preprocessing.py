"""From packets to the engine without the host: frames are decoded by engines of two devices and put together on one,
Hugging Face's video processors resize and normalise them there, and the result goes to another process by CUDA IPC.

In between, no byte of a picture comes to the host; the values are compared at the end, and so are the tokens that real
engines make of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch

from benchmarks.gpu.nvdec.clips import encoded as texture
from dev.child_process import ChildProcess
from tests.cuda_double import control, hf_processors, video
from tests.cuda_double.engine_side import EngineSide, engine_side
from tests.cuda_double.engine_tokens import BYTES, FAMILIES, TOKENS
from tests.engine.harness.processes import ENVIRONMENT, IN_PROCESS, NO_PLUGIN
from tests.support.nvcodec import video as gradient
from tests.support.pixel_levels import Levels, deviation_of
from vllm_omni_sched.video.on_device import PROCESSORS, FramesReason, Server, of_server
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.service import FlashCodec

ROOM = 8 << 20
WANTED = list(range(0, 60, 5))
DOCUMENTED = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni", "qwen3_vl", "qwen3_5", "qwen3_omni_moe")
"""Types of the models that `docs/video.md` names."""
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-vl": ("qwen2_vl", {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}),
    "qwen2-vl enlarging": ("qwen2_vl", {"size": {"shortest_edge": 28 * 28 * 128, "longest_edge": 28 * 28 * 768}}),
    "qwen2.5-vl": ("qwen2_5_vl", {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}),
    "qwen2.5-vl reducing": ("qwen2_5_vl", {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}}),
    "qwen2.5-vl bytes": ("qwen2_5_vl", {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}, **BYTES}),
    "qwen3-vl": ("qwen3_vl", {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}),
    "qwen3-vl enlarging": ("qwen3_vl", {"size": {"shortest_edge": 12 * 256 * 256, "longest_edge": 25165824}}),
    "qwen3-vl reducing": ("qwen3_vl", {"size": {"shortest_edge": 4096, "longest_edge": 12 * 64 * 64}}),
    "qwen3-vl bytes": ("qwen3_vl", {"size": {"shortest_edge": 4096, "longest_edge": 12 * 128 * 128}, **BYTES}),
}
"""Type of model, and arguments of its video processor."""
CLIPS = ("gradient", "texture")


@lru_cache
def clip(name: str) -> bytes:
    if name == "gradient":
        return gradient(frames=60, options="bf=2 g=12 keyint_min=12 sc_threshold=0")
    return texture("h264", 2, 176, 144, 30, 12)


@lru_cache
def frames_of_cpus(name: str) -> npt.NDArray[np.uint8]:
    """Return the wanted frames of a clip as the host gets them."""
    with FlashCodec(VideoOptions.model_validate({"decoders": 1})) as codec:
        frames: npt.NDArray[np.uint8] = codec.load(clip(name), lambda index: WANTED).frames
    return frames.copy()  # to keep it, without the memory of that service


def pixel_values(processor: Any, frames: Any, **more: Any) -> torch.Tensor:
    found: torch.Tensor = processor([frames], return_tensors="pt", do_sample_frames=False, **more)[
        "pixel_values_videos"
    ]
    return found


@contextmanager
def resized_in_floats() -> Iterator[None]:
    """Let torchvision resize bytes on the host as on a device: in floats, rounded once."""
    from torchvision.transforms.v2.functional import _geometry

    with mock.patch.object(_geometry, "_do_native_uint8_resize_on_cpu", return_value=False):
        yield


@pytest.fixture(scope="module")
def codec() -> Iterator[FlashCodec]:
    with video.service(ROOM) as codec:
        yield codec


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineSide]:
    with engine_side() as side:
        yield side


def test_every_documented_model_has_a_checked_processor() -> None:
    named = hf_processors.families()
    assert {named[model] for model in DOCUMENTED} == PROCESSORS
    assert {named[model] for model, _ in SETTINGS.values()} == PROCESSORS


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_frames_are_preprocessed_on_their_device_and_handed_on_without_the_host(
    setting: str, name: str, codec: FlashCodec, engine: EngineSide, tmp_path: Path
) -> None:
    model, arguments = SETTINGS[setting]
    processor = hf_processors.video_processor(hf_processors.families()[model])(**arguments)
    expected = pixel_values(processor, frames_of_cpus(name))
    with resized_in_floats():
        exact = pixel_values(processor, torch.from_numpy(frames_of_cpus(name)))
    before = control.counts()
    decoded = codec.load(clip(name), lambda index: WANTED)
    assert decoded.report.fallbacks == ()
    assert isinstance(decoded.frames, torch.Tensor)
    held = torch.cuda.memory_allocated(1)
    values = pixel_values(processor, decoded.frames, device="cuda:1")
    assert values.device == decoded.frames.device == torch.device("cuda", 1)
    file = tmp_path / "values.npy"
    received = engine.receive(values, expected, deviation_of(processor), file)
    now = control.counts()
    copies, from_host = now.copies - before.copies, now.staged - before.staged
    assert copies == from_host == (2 if processor.do_normalize else 0)  # mean and deviation
    assert received.device == "cuda:1"
    assert (received.mapped, received.copies) == (1, 0)
    assert np.array_equal(np.load(file), exact.numpy())
    assert received.levels.within_tolerance(full_of_edges=name == "texture"), received.levels
    assert np.array_equal(decoded.frames.cpu().numpy(), frames_of_cpus(name))
    assert control.counts().copies == now.copies + 1  # a copy to the host is counted
    del values, decoded
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated(1) <= held + 2 * 512  # the processor keeps mean and deviation


def test_frames_for_any_other_processor_go_to_the_host_with_a_reason() -> None:
    others = set(hf_processors.families().values()) - PROCESSORS
    assert "LlavaOnevisionVideoProcessor" in others
    reasons = {of_server(Server(ROOM, 2, other, "cuda", "torch_shm")) for other in others}
    assert reasons == {FramesReason.PROCESSOR_UNKNOWN}
    with video.service(ROOM, *reasons) as codec:
        decoded = codec.load(clip("gradient"), lambda index: WANTED)
    assert decoded.report.fallbacks == ("device_processor_unknown",)
    assert isinstance(decoded.frames, np.ndarray)
    assert np.array_equal(decoded.frames, frames_of_cpus("gradient"))


@pytest.fixture(scope="module")
def tokens(codec: FlashCodec, engine: EngineSide, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the tokens of real engines for each clip, with the tiny model of each family."""
    folder = tmp_path_factory.mktemp("tokens")
    for family, how in FAMILIES.items():
        how.write_processors(folder)
        processor = hf_processors.video_processor(how.processor).from_pretrained(folder, **how.arguments)
        for name in CLIPS:
            frames, values = frames_of_cpus(name), folder / "values.npy"
            decoded = codec.load(clip(name), lambda index: WANTED)
            on_device = pixel_values(processor, decoded.frames, device="cuda:1")
            engine.receive(on_device, pixel_values(processor, frames), deviation_of(processor), values)
            np.savez(
                folder / f"{family}-{name}.npz",
                frames=frames,
                numbers=decoded.indices,
                values=np.load(values),
                deviation=deviation_of(processor),
            )
    python = hf_processors.WITH_VLLM / "bin" / "python"
    command = [str(python), "-m", "tests.cuda_double.engine_tokens", str(folder)]
    environment = {**ENVIRONMENT, **NO_PLUGIN, **IN_PROCESS}
    with ChildProcess(command, log=folder / "engines.log", env=environment) as process:
        code = process.wait()
    assert code == 0, "\n".join(process.last_lines(60))
    found: dict[str, Any] = json.loads(process.last_lines(1)[0])
    return found


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_engines_give_the_tokens_of_the_host_path(family: str, name: str, tokens: dict[str, Any]) -> None:
    found = tokens[family][name]
    assert len(found["host"]) == TOKENS
    assert found["device"] == found["host"]
    assert found["altered"] != found["host"]  # the engine has read the values that it was given
    levels = Levels(*found["device levels"])  # from what vLLM's processor makes of the frames
    assert levels.within_tolerance(full_of_edges=name == "texture"), levels
    assert levels.mean > 0
    assert not Levels(*found["altered levels"]).within_tolerance(full_of_edges=True)

"""Frames that stay on a device, with memory of the host in its place: where they go, why, and for how long.

The decoders are processes, as they are with a GPU, and map the memory as they map a device's.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.host_device import HostDriver
from tests.support.nvcodec import plain, video
from vllm_omni_sched.config.errors import ConfigError, VideoDeadlineError
from vllm_omni_sched.config.load import read_options
from vllm_omni_sched.graph.order import INTERACTIVE
from vllm_omni_sched.video.device_memory import SCRATCH_BYTES, DeviceFrames, DeviceFramesView
from vllm_omni_sched.video.frame_memory import BLOCK
from vllm_omni_sched.video.on_device import FramesReason, Server, of_server, of_video
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool.assignment import IdleDecoder, PieceAssigner, WaitingPiece, WaitingVideo
from vllm_omni_sched.video.pool.kinds import DecoderKind, cpu_kind
from vllm_omni_sched.video.sandbox.seccomp import Profile
from vllm_omni_sched.video.service import FlashCodec

BFRAMES = "bf=2 g=16 keyint_min=16 sc_threshold=0"
INTERLACED = "x264-params=tff=1:log-level=none"
WANTED = [0, 7, 16, 31, 47]
FRAME_BYTES = 64 * 48 * 3

Start = Callable[..., FlashCodec]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start services whose frames stay on a device."""
    started: list[FlashCodec] = []

    def start(
        devices: tuple[int, ...] = (0, 1),
        device_bytes: int = 4 * BLOCK,
        place: FramesReason = FramesReason.ON_DEVICE,
        driver: HostDriver | None = None,
    ) -> FlashCodec:
        options = VideoOptions.model_validate({"decoders": 1, "nvdec": "auto", "device_bytes": device_bytes})
        cards = DecoderKind("nvdec", "tests.support.nvcodec:sharing_card", Profile.DEVICE, devices)
        codec = FlashCodec(options, kinds=(cards, cpu_kind(options)), place=place, device_driver=driver or HostDriver())
        started.append(codec)
        return codec

    yield start
    for codec in started:
        codec.close()


def frames_of(data: bytes, wanted: list[int] = WANTED) -> Any:
    shown = list(plain(data).values())
    return [shown[number] for number in wanted]


def server(**changes: Any) -> Server:
    return Server(**{**SERVER, **changes})


SERVER: dict[str, Any] = {
    "device_bytes": 1,
    "engines": 1,
    "processor": "Qwen3VLVideoProcessor",
    "processor_device": "cuda",
    "transport": "torch_shm",
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, FramesReason.ON_DEVICE),
        ({"device_bytes": 0, "engines": 0}, FramesReason.OFF),
        ({"engines": 0}, FramesReason.NO_ENGINES),
        ({"processor_device": None}, FramesReason.PROCESSOR_ON_HOST),
        ({"processor_device": "cpu"}, FramesReason.PROCESSOR_ON_HOST),
        ({"processor": "LlavaOnevisionVideoProcessor"}, FramesReason.PROCESSOR_UNKNOWN),
        ({"processor": None}, FramesReason.PROCESSOR_UNKNOWN),
        ({"transport": "direct_rpc"}, FramesReason.TRANSPORT),
    ],
)
def test_what_a_server_needs_for_frames_to_stay(changes: dict[str, Any], reason: FramesReason) -> None:
    assert of_server(server(**changes)) is reason


def test_what_a_video_needs_for_its_frames_to_stay() -> None:
    assert of_video(10, 10) is FramesReason.ON_DEVICE
    assert of_video(11, 10) is FramesReason.TOO_LARGE


def test_memory_for_frames_on_a_device_needs_a_decoder_there() -> None:
    assert VideoOptions().device_bytes == 0
    with pytest.raises(ConfigError, match="'device_bytes' is given, but 'nvdec' is off"):
        read_options(VideoOptions, {"device_bytes": 1 << 30}, group="video")


def near(
    links: dict[int, float],
    opened: int = -1,
    nbytes: int = 100,
    cost: float = 1.0,
    pieces: int = 4,
    starting: int = 0,
) -> list[int]:
    """Return the decoders that get a piece, in the order of their pieces; all are idle, but those that start."""
    waiting = tuple(WaitingPiece(number, cost, 1, nbytes) for number in range(pieces))
    idle = [IdleDecoder(number, "nvdec", 1 if number == opened else None, link) for number, link in links.items()]
    found = PieceAssigner().plan(
        [WaitingVideo(1, 0.0, INTERACTIVE, "nvdec", waiting)],
        idle,
        {"nvdec": len(idle)},
        0,
        0.0,
        {"nvdec": [*links.values(), *[math.inf] * starting]},
    )
    return [assignment.decoder for assignment in found]


def test_the_decoders_with_the_fastest_links_get_pieces_first() -> None:
    assert near({0: 1e3, 1: 1e9, 2: 1e6}, pieces=2) == [1, 2]
    assert near({0: 1e3, 1: 1e9, 2: 1e6}, pieces=2, opened=2) == [2, 1]
    assert near({0: 1e3, 1: 1e9}, nbytes=0, pieces=1) == [0]  # frames that go to the host use no link


def test_a_decoder_behind_a_slow_link_is_left_idle_when_the_near_ones_are_sooner_done() -> None:
    assert near({0: 10.0, 1: 1e9}) == [1]  # 10 s for the copy; the near one needs 4 s for all
    assert near({0: 10.0, 1: 1e9}, cost=3.0) == [1, 0]  # it would need 12 s
    assert near({0: 10.0}) == [0]  # there is no other
    assert near({0: 0.0, 1: 1e9}, cost=1e6) == [1]  # it does not reach the memory
    assert near({0: 0.0, 1: 0.0}) == [0, 1]  # none does: the decoders say so
    assert near({0: 0.0}, starting=1) == []  # one that starts may
    assert near({0: 1e3}, starting=1) == [0]


def test_rooms_are_given_back_with_the_last_view_of_them() -> None:
    returned: list[str] = []
    memory = DeviceFrames(0, 2 * BLOCK, lambda: returned.append("room"), HostDriver())
    first, second = memory.allocate(BLOCK, lambda: 0.0), memory.allocate(BLOCK, lambda: 0.0)
    assert (first.start, second.start) == (0, BLOCK)
    frame = first.tensor().reshape(2, -1)[1]
    del first
    gc.collect()
    with pytest.raises(VideoDeadlineError, match="raise option 'device_bytes'"):
        memory.allocate(1, lambda: 0.0)
    del frame
    gc.collect()
    assert returned == ["room"]
    assert memory.allocate(1, lambda: 0.0).start == 0
    memory.close()
    second.tensor().fill_(1)  # rooms in use outlive the service


def test_memory_that_cannot_be_shared_is_refused() -> None:
    driver = HostDriver()
    driver.room = BLOCK
    with pytest.raises(MemoryError, match="no memory on the device"):
        DeviceFrames(0, BLOCK, lambda: None, driver)
    driver = HostDriver()
    driver.fails["export"] = RuntimeError("not supported")
    with pytest.raises(MemoryError, match="cannot be shared: not supported"):
        DeviceFrames(0, BLOCK, lambda: None, driver)


class _Ordered(HostDriver):
    """Notes whether the block was still there when its export was ended."""

    def unexport(self, exported: Any) -> None:
        super().unexport(exported)
        self.calls.append(f"unexported, blocks: {len(self.files)}")


def test_the_export_ends_before_the_block_is_freed() -> None:
    driver = _Ordered()
    memory = DeviceFrames(0, BLOCK, lambda: None, driver)
    memory.close()
    memory.close()
    assert driver.calls == ["export", "unexported, blocks: 1"]
    assert driver.files == {}


class _OneProcess(HostDriver):
    """Maps memory of this process itself."""

    def map(self, index: int, exported: Any, keep: list[Any]) -> Any:
        return self.own(index, self.block, self.record(index), keep)

    def allocate(self, index: int, nbytes: int) -> torch.Tensor:
        self.block = super().allocate(index, nbytes)
        return self.block


def test_the_speed_of_a_link_is_measured_beside_the_frames() -> None:
    driver = _OneProcess()
    memory = DeviceFrames(0, BLOCK, lambda: None, driver)
    room = memory.allocate(BLOCK, lambda: 0.0)
    room.tensor().fill_(7)
    times = iter([10.0, 12.0])
    view = DeviceFramesView(memory.shared, driver)
    source = torch.full((SCRATCH_BYTES,), 9, dtype=torch.uint8)
    assert view.link_bytes_per_second(source, lambda: None, lambda: next(times)) == 4 * SCRATCH_BYTES / 2.0
    assert bool((room.tensor() == 7).all())
    assert bool((view.room(0, BLOCK) == 7).all())


@pytest.mark.slow  # processes that import torch
def test_frames_stay_on_the_device_and_are_those_of_a_plain_decode(start: Start) -> None:
    codec = start()
    for data in (video(options=BFRAMES), video(frames=192, options=BFRAMES)):
        found = codec.load(data, lambda index: WANTED)
        assert isinstance(found.frames, torch.Tensor)
        assert np.array_equal(found.frames.numpy(), frames_of(data))
        assert found.indices == WANTED
        assert found.report.fallbacks == ()
        assert found.report.used == len(WANTED)
    other = video(pixels="yuv444p", options=BFRAMES)
    refused = codec.load(other, lambda index: WANTED)
    assert isinstance(refused.frames, np.ndarray)
    assert np.array_equal(refused.frames, frames_of(other))
    assert refused.report.fallbacks == ("device_refused",)


@pytest.mark.slow  # processes that import torch
def test_an_interlaced_video_is_decoded_on_the_cpu_and_goes_to_the_host(start: Start) -> None:
    data = video(options=f"{BFRAMES} {INTERLACED}")
    found = start().load(data, lambda index: WANTED)
    assert found.report.fallbacks == ("device_refused",)
    assert isinstance(found.frames, np.ndarray)
    assert np.array_equal(found.frames, frames_of(data))


@pytest.mark.slow  # processes that import torch
def test_further_videos_wait_until_frames_are_dropped(start: Start) -> None:
    codec = start(device_bytes=BLOCK)
    data = video(options=BFRAMES)
    held = codec.load(data, lambda index: WANTED)
    with pytest.raises(VideoDeadlineError, match="raise option 'device_bytes'"):
        codec.load(data, lambda index: WANTED, deadline_seconds=2.0)
    assert np.array_equal(held.frames, frames_of(data))
    del held
    gc.collect()
    assert isinstance(codec.load(data, lambda index: WANTED).frames, torch.Tensor)


@pytest.mark.slow  # processes that import torch
def test_frames_that_do_not_fit_go_to_the_host_with_a_reason(start: Start) -> None:
    codec = start(device_bytes=3 * FRAME_BYTES)
    data = video(options=BFRAMES)
    found = codec.load(data, lambda index: WANTED)
    assert found.report.fallbacks == ("device_too_large",)
    assert np.array_equal(found.frames, frames_of(data))
    assert isinstance(codec.load(data, lambda index: WANTED[:3]).frames, torch.Tensor)


@pytest.mark.slow  # processes that import torch
def test_a_server_that_cannot_keep_frames_there_says_why_with_each_video(start: Start) -> None:
    data, full = video(options=BFRAMES), HostDriver()
    full.room = 1
    for codec, reason in (
        (start(place=FramesReason.PROCESSOR_ON_HOST), "device_processor_on_host"),
        (start(driver=full), "device_no_memory"),
    ):
        found = codec.load(data, lambda index: WANTED)
        assert found.report.fallbacks == (reason,)
        assert np.array_equal(found.frames, frames_of(data))


@pytest.mark.slow  # processes that import torch
def test_engines_that_do_not_reach_the_memory_leave_the_work_to_those_that_do(start: Start) -> None:
    data = video(frames=192, options=BFRAMES)
    found = start(devices=(9, 0)).load(data, lambda index: WANTED)
    assert found.report.fallbacks == ()
    assert isinstance(found.frames, torch.Tensor)
    assert np.array_equal(found.frames.numpy(), frames_of(data))
    alone = start(devices=(9,)).load(data, lambda index: WANTED)
    assert alone.report.fallbacks == ("device_refused",)
    assert np.array_equal(alone.frames, frames_of(data))

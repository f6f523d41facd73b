"""Frames that stay on a device: decoded by engines of two devices, put together on one, and handed on by CUDA IPC.

No byte of a frame comes to the host in between; the tests look at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tests.cuda_double import control, video
from tests.cuda_double.actor import CountingCuda
from tests.support.arena import EDGE
from tests.support.nvcodec import plain
from tests.support.nvcodec import video as encoded
from tests.support.processes import Process
from vllm_omni_sched.config.errors import VideoDeadlineError
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.cuda_ipc import CudaIpcOptions, CudaIpcTransport
from vllm_omni_sched.connectors.cuda_ipc.cuda import CudaShare
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.video.service import FlashCodec

BFRAMES = "bf=2 g=16 keyint_min=16 sc_threshold=0"
WANTED = list(range(0, 192, 9))
ROOM = 4 << 20


@pytest.fixture
def codec() -> Iterator[FlashCodec]:
    with video.service(ROOM) as codec:
        yield codec


def test_frames_of_two_devices_are_put_together_on_one(codec: FlashCodec) -> None:
    for options in (BFRAMES, "bf=0 g=12 keyint_min=12 sc_threshold=0"):
        data = encoded(frames=192, options=options)
        before = control.counts().copies
        found = codec.load(data, lambda index: WANTED)
        assert found.report.fallbacks == ()
        assert isinstance(found.frames, torch.Tensor)
        assert found.frames.device == torch.device("cuda", 1)
        assert control.counts().copies == before  # this process has copied nothing
        shown = list(plain(data).values())
        assert np.array_equal(found.frames.cpu().numpy(), [shown[number] for number in WANTED])


@pytest.mark.parametrize(
    ("pixels", "options"),
    [("yuv444p", ""), ("yuv420p", "x264-params=tff=1:log-level=none")],
    ids=["yuv444p", "interlaced"],
)
def test_a_video_that_no_device_decodes_comes_to_the_host_with_a_reason(
    codec: FlashCodec, pixels: str, options: str
) -> None:
    data = encoded(pixels=pixels, options=f"{BFRAMES} {options}")
    found = codec.load(data, lambda index: [0, 20])
    assert found.report.fallbacks == ("device_refused",)
    assert isinstance(found.frames, np.ndarray)
    shown = list(plain(data).values())
    assert np.array_equal(found.frames, [shown[0], shown[20]])


def test_room_is_used_again_only_once_the_device_has_read_it(codec: FlashCodec) -> None:
    data = encoded(frames=192, options=BFRAMES)
    held = [codec.load(data, lambda index: WANTED).frames for _ in range(2)]  # a room is half of the memory
    with pytest.raises(VideoDeadlineError, match="raise option 'device_bytes'"):
        codec.load(data, lambda index: WANTED, deadline_seconds=1.0)
    torch.cuda.set_device(1)
    try:
        with control.holding(torch.cuda.current_stream()):
            assert isinstance(held[0], torch.Tensor)
            copy = held[0].clone()  # does not run yet
            dropping = threading.Thread(target=lambda: held.pop(0))
            dropping.start()
            with pytest.raises(VideoDeadlineError):
                codec.load(data, lambda index: WANTED, deadline_seconds=1.0)
        dropping.join()
        again = codec.load(data, lambda index: WANTED[:3])
        shown = list(plain(data).values())
        assert np.array_equal(copy.cpu().numpy(), [shown[number] for number in WANTED])
        assert isinstance(again.frames, torch.Tensor)
    finally:
        torch.cuda.set_device(0)


def test_the_frames_go_to_another_process_without_the_host(
    codec: FlashCodec, start: Callable[..., Process], arena: ArenaOptions
) -> None:
    data = encoded(frames=192, options=BFRAMES)
    receiver = start()
    chosen = CudaIpcOptions.model_validate({"min_bytes": 1})
    driver = CountingCuda()
    path = CudaIpcTransport(chosen, arena, lambda token, alive: CudaShare(token, alive, driver))
    found = codec.load(data, lambda index: WANTED)
    assert isinstance(found.frames, torch.Tensor)
    path.put(make_message(Edge(*EDGE), "frames", {"x": found.frames.reshape(1, -1)}))
    assert driver.exported == 1  # the message has a handle in place of the frames
    assert receiver.begin_get("frames", "frames") is True
    shown = list(plain(data).values())
    expected = sum(int(shown[number].sum(dtype=np.int64)) for number in WANTED)
    assert receiver.checksum("frames") == (1, expected)
    receiver.drop("frames")
    receiver.reap()  # its device has copied the block
    path.close()
    assert driver.exported == 0


@pytest.mark.parametrize("held", [False, True], ids=["dropped before", "dropped after"])
def test_the_memory_goes_back_to_the_device_when_the_service_is_closed(codec: FlashCodec, held: bool) -> None:
    before = torch.cuda.memory_allocated(1)
    found = [codec.load(encoded(frames=192, options=BFRAMES), lambda index: WANTED).frames]
    assert torch.cuda.memory_allocated(1) > before
    if not held:
        found.clear()
    codec.close()
    assert (torch.cuda.memory_allocated(1) > before) is held
    found.clear()
    assert torch.cuda.memory_allocated(1) == before

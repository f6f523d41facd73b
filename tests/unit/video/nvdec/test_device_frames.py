"""Frames that stay on a device, with memory of the host in its place: where they go, why, and for how long.

The decoders are processes, as they are with a GPU, and map the memory as they map a device's.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.host_device import HostDriver
from vllm_omni_sched.graph.order import INTERACTIVE
from vllm_omni_sched.video.device_memory import SCRATCH_BYTES, DeviceFrames, DeviceFramesView
from vllm_omni_sched.video.frame_memory import BLOCK
from vllm_omni_sched.video.on_device import FramesReason, Server, of_server
from vllm_omni_sched.video.pool.assignment import IdleDecoder, PieceAssigner, WaitingPiece, WaitingVideo


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


def test_memory_that_cannot_be_shared_is_refused() -> None:
    driver = HostDriver()
    driver.room = BLOCK
    with pytest.raises(MemoryError, match="no memory on the device"):
        DeviceFrames(0, BLOCK, lambda: None, driver)
    driver = HostDriver()
    driver.fails["export"] = RuntimeError("not supported")
    with pytest.raises(MemoryError, match="cannot be shared: not supported"):
        DeviceFrames(0, BLOCK, lambda: None, driver)


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

"""What only a `StreamLane` promises, on a device whose progress the test decides."""

from __future__ import annotations

import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.stream_device import HostDevice
from vllm_omni_sched.config.errors import LaneClosedError, LaneError
from vllm_omni_sched.lanes import CudaDevice, Job, StreamLane
from vllm_omni_sched.lanes.cuda import green_context
from vllm_omni_sched.lanes.stream import LAUNCHED_AHEAD

LONG = 20.0
Work = Callable[[Any, Callable[[], None]], Any]


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.fixture
def lane_of(device: HostDevice) -> Iterator[Callable[..., StreamLane]]:
    lanes: list[StreamLane] = []

    def make(work: Work, capacity: int = 8) -> StreamLane:
        lanes.append(StreamLane(work, capacity, device=device))
        return lanes[-1]

    yield make
    device.go_on()
    for lane in lanes:
        lane.close(5.0)


def layers(count: int) -> Work:
    def work(payload: Any, pause: Callable[[], None]) -> Any:
        for _ in range(count):
            pause()
        return payload

    return work


def test_at_the_whole_share_slices_are_launched_ahead(device, lane_of):
    lane = lane_of(layers(LAUNCHED_AHEAD + 2))
    lane.submit(Job("a", None))
    assert lane.drain(LONG)
    lane.poll()
    verbs = [verb for verb, _ in device.asked("lane", "mark", "synchronize")]
    assert verbs == ["mark"] * (LAUNCHED_AHEAD + 1) + ["synchronize", "mark"] * 2 + ["synchronize"]


def test_the_device_has_work_while_another_thread_keeps_the_interpreter(device, lane_of):
    """The lane launches all of a small encode before the device has finished its first slice."""
    device.held_up = True
    lane = lane_of(layers(LAUNCHED_AHEAD))
    lane.submit(Job("a", None))
    assert not lane.wait(0.02)
    device.wait_for_marks("lane", LAUNCHED_AHEAD + 1)
    device.go_on()
    assert lane.drain(LONG)


def test_at_less_each_slice_is_waited_for(device, lane_of):
    lane = lane_of(layers(3))
    lane.set_share(0.5)
    lane.submit(Job("a", None))
    assert lane.drain(LONG)
    asked = device.asked("lane", "mark", "synchronize")
    assert [verb for verb, _ in asked] == ["mark", "synchronize"] * 4
    assert [point for verb, point in asked if verb == "mark"] == [point for verb, point in asked if verb != "mark"]


def test_closing_does_not_wait_for_a_device_that_hangs(device, lane_of):
    device.held_up = True
    lane = lane_of(layers(1))
    lane.submit(Job("a", None))
    lane.close(0.05)
    assert [type(done.error) for done in lane.poll()] == [LaneClosedError]


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_cuda_is_asked_of_cuda_devices_only(name):
    with pytest.raises(LaneError, match=f"needs a CUDA device, got '{name}'"):
        CudaDevice(torch.device(name))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch may have green contexts")
def test_multiprocessors_that_cannot_be_had_are_refused():
    with pytest.raises(
        LaneError,
        match=r"cannot have 8 multiprocessors of its own: torch .* has no green contexts.*; choose another value of "
        r"option 'expert\.encode_lane_sms', or leave it out",
    ):
        green_context(8, torch.device("cuda", 0))


def test_what_torch_says_about_an_unsupported_part_is_passed_on(monkeypatch: pytest.MonkeyPatch):
    class GreenContext:
        Stream = object

        @staticmethod
        def create(num_sms: int, device_id: int) -> GreenContext:
            raise RuntimeError("GreenContext requires the cuda.bindings package\nand a long trace")

    module = types.ModuleType("torch.cuda.green_contexts")
    vars(module).update(GreenContext=GreenContext)
    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", module)
    green_context.cache_clear()
    with pytest.raises(LaneError, match=r"its own: GreenContext requires the cuda\.bindings package; choose"):
        green_context(8, torch.device("cuda", 0))


@pytest.mark.parametrize("of_module", [{"SUPPORTED": True}, {}], ids=["torch 2.11 to 2.13", "torch 2.14"])
def test_a_part_of_the_multiprocessors_is_never_given_back(monkeypatch: pytest.MonkeyPatch, of_module: dict[str, Any]):
    """On an H200, memory that was freed after its green context was destroyed ended the process."""
    made: list[weakref.ref[GreenContext]] = []

    class GreenContext:
        Stream = object

        @staticmethod
        def create(num_sms: int, device_id: int) -> GreenContext:
            context = GreenContext()
            made.append(weakref.ref(context))
            return context

    module = types.ModuleType("torch.cuda.green_contexts")
    vars(module).update(of_module, GreenContext=GreenContext)
    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", module)
    green_context.cache_clear()
    one = green_context(8, torch.device("cuda", 0))
    assert green_context(8, torch.device("cuda", 0)) is one
    del one
    green_context.cache_clear()
    gc.collect()
    (context,) = made
    assert context() is not None

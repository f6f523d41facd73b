"""What only a `StreamLane` promises, on a device whose progress the test decides."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.stream_device import HostDevice, OutOfMemory
from vllm_omni_sched.config.errors import LaneClosedError, LaneError, LaneWorkError
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


def test_a_job_is_reported_when_the_device_is_done_with_it_and_nobody_waited(device, lane_of):
    device.held_up = True
    launched = threading.Event()
    lane = lane_of(lambda payload, pause: launched.set() or payload)
    for i in range(3):
        assert lane.submit(Job(str(i), i))
    assert launched.wait(LONG)
    assert not lane.wait(0.02)
    assert lane.poll() == []
    assert lane.held == 3
    device.go_on()
    assert lane.drain(LONG)
    assert [done.result for done in lane.poll()] == [0, 1, 2]
    assert device.asked("owner", "synchronize") == []


def test_work_follows_its_owner_and_the_owner_follows_the_result(device, lane_of):
    lane = lane_of(lambda payload, pause: [payload])
    lane.submit(Job("a", "image"))
    ((_, submitted),) = device.asked("owner", "mark")
    assert lane.drain(LONG)
    assert device.asked("lane", "follow") == [("follow", (submitted, ()))]
    (done,) = lane.poll()
    last_of_lane = device.asked("lane", "mark")[-1][1]
    assert device.asked("owner", "follow") == [("follow", (last_of_lane, done.result))]


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


def test_what_a_failed_job_had_launched_is_over_before_it_is_reported(device, lane_of):
    def work(payload: Any, pause: Callable[[], None]) -> Any:
        raise ArithmeticError(payload)

    device.held_up = True
    lane = lane_of(work)
    lane.submit(Job("a", "bad"))
    assert not lane.wait(0.02)
    device.go_on()
    assert lane.wait(LONG)
    (done,) = lane.poll()
    assert isinstance(done.error, LaneWorkError)
    assert device.asked("owner", "follow") == []


def test_out_of_memory_is_of_one_job_and_its_memory_is_free_when_the_cache_is_emptied(lane_of, device):
    activations: list[weakref.ref[torch.Tensor]] = []
    alive_when_emptied: list[bool] = []
    device.empty_cache = lambda: alive_when_emptied.extend(ref() is not None for ref in activations)

    def layer(tensor: torch.Tensor) -> None:
        raise OutOfMemory("tried to allocate 2 GiB")

    def work(payload: Any, pause: Callable[[], None]) -> Any:
        if payload == "huge":
            activation = torch.zeros(8)
            activations.append(weakref.ref(activation))
            layer(activation)
        return payload

    lane = lane_of(work)
    gc.disable()
    try:
        for payload in ("small", "huge", "small again"):
            lane.submit(Job(payload, payload))
        assert lane.drain(LONG)
    finally:
        gc.enable()
    small, huge, again = lane.poll()
    assert (small.result, again.result) == ("small", "small again")
    assert isinstance(huge.error, LaneWorkError)
    assert str(huge.error) == "OutOfMemory: tried to allocate 2 GiB"
    assert alive_when_emptied == [False]


def test_closing_does_not_wait_for_a_device_that_hangs(device, lane_of):
    device.held_up = True
    lane = lane_of(layers(1))
    lane.submit(Job("a", None))
    lane.close(0.05)
    assert [type(done.error) for done in lane.poll()] == [LaneClosedError]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_on_cuda_results_stay_on_the_device_and_their_memory_is_not_used_again_too_soon():
    cuda = torch.device("cuda")
    weights = torch.ones(2048, 2048, device=cuda)

    def work(payload: torch.Tensor, pause: Callable[[], None]) -> torch.Tensor:
        value = payload.to(cuda, non_blocking=True)
        for _ in range(4):
            value = (value @ weights) / 2048
            pause()
        return value

    lane = StreamLane(work, 8, device=CudaDevice(cuda))
    sums = []
    for i in range(40):
        lane.submit(Job("a", torch.full((2048, 2048), float(i)).pin_memory()))
        assert lane.wait(LONG)
        (done,) = lane.poll()
        sums.append((weights @ done.result).mean())  # freed while this may still run
        del done
    assert [round(value.item() / 2048) for value in sums] == list(range(40))
    lane.close()


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

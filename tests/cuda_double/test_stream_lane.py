"""The lane that is a stream, on asynchronous devices: order, memory, cancellation, lack of memory, priority."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.cuda_double.control import hold, holding, holding_all, let_go, set_memory_bound
from tests.cuda_double.kernels import launch
from vllm_omni_sched.config.errors import LaneWorkError
from vllm_omni_sched.lanes import CudaDevice, Job, StreamLane

CUDA = torch.device("cuda", 0)
LONG = 20.0
SIZE = 1 << 16
Pause = Callable[[], None]
Work = Callable[[Any, Pause], Any]


@pytest.fixture(params=[None, 16], ids=["stream", "green context"])
def num_sms(request: pytest.FixtureRequest) -> int | None:
    """Multiprocessors of the lane: all, or a green context of its own."""
    found: int | None = request.param
    return found


@pytest.fixture
def device(num_sms: int | None) -> CudaDevice:
    return CudaDevice(CUDA, num_sms)


@pytest.fixture
def lane_of(device: CudaDevice) -> Iterator[Callable[..., StreamLane]]:
    lanes: list[StreamLane] = []

    def make(work: Work, capacity: int = 8, of: CudaDevice = device) -> StreamLane:
        lanes.append(StreamLane(work, capacity, device=of))
        return lanes[-1]

    yield make
    let_go(torch.cuda.default_stream())
    let_go(device._stream)
    for lane in lanes:
        lane.close(LONG)


def doubled_thrice(payload: torch.Tensor, pause: Pause) -> torch.Tensor:
    value = payload.to(CUDA, non_blocking=True)
    for _ in range(3):
        value = value + value
        pause()
    return value


def result_of(lane: StreamLane) -> Any:
    assert lane.wait(LONG)
    (done,) = lane.poll()
    if done.error is not None:
        raise done.error
    return done.result


def test_forty_jobs_give_what_the_processor_gives(lane_of: Any) -> None:
    lane = lane_of(doubled_thrice)
    sums = []
    for i in range(40):
        assert lane.submit(Job("a", torch.full((SIZE,), float(i)).pin_memory()))
        sums.append((result_of(lane) * 2).sum())  # the result is freed while this may still run
    assert [value.item() for value in sums] == [16.0 * i * SIZE for i in range(40)]


def test_results_come_in_order_from_a_full_lane(lane_of: Any) -> None:
    lane = lane_of(doubled_thrice)
    for i in range(8):
        assert lane.submit(Job(str(i), torch.full((SIZE,), float(i))))
    assert not lane.submit(Job("too many", torch.zeros(1)))
    assert lane.drain(LONG)
    done = lane.poll()
    assert [one.key for one in done] == [str(i) for i in range(8)]
    assert [float(one.result[-1].cpu()) for one in done] == [8.0 * i for i in range(8)]


def test_work_sees_what_its_owner_had_launched_before(lane_of: Any) -> None:
    lane = lane_of(doubled_thrice)
    value = torch.zeros(SIZE, device=CUDA)
    torch.cuda.synchronize()
    with holding(torch.cuda.default_stream()):
        value.fill_(3.0)
        assert lane.submit(Job("a", value))
        assert not lane.wait(0.05)
    assert bool((result_of(lane).cpu() == 24.0).all())


def test_nothing_is_reported_before_the_device_has_finished_it_and_nobody_waits(lane_of: Any, device: Any) -> None:
    lane = lane_of(doubled_thrice)
    hold(device._stream)
    assert lane.submit(Job("a", torch.ones(SIZE)))
    assert not lane.wait(0.05)
    assert lane.poll() == []
    let_go(device._stream)
    assert bool((result_of(lane).cpu() == 8.0).all())


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "with the fault"])
def test_without_the_owners_mark_work_would_overtake_it(
    lane_of: Any, monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    if fault:
        monkeypatch.setattr(CudaDevice, "follow", lambda self, mark, tensors: None)
    lane = lane_of(doubled_thrice)
    value = torch.zeros(SIZE, device=CUDA)
    torch.cuda.synchronize()
    hold(torch.cuda.default_stream())
    value.fill_(3.0)
    assert lane.submit(Job("a", value))
    assert lane.wait(60 if fault else 0.1) == fault
    let_go(torch.cuda.default_stream())
    assert bool((result_of(lane).cpu() == 24.0).all()) != fault


@pytest.mark.parametrize(
    ("synchronizes", "follows"),
    [(True, True), (False, True), (True, False), (False, False)],
    ids=["as it is", "by the owner's wait alone", "by the lane's wait alone", "with both faults"],
)
def test_without_both_waits_the_owner_would_read_a_result_too_soon(
    lane_of: Any, device: Any, monkeypatch: pytest.MonkeyPatch, synchronizes: bool, follows: bool
) -> None:
    if not synchronizes:
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)
    if not follows:
        monkeypatch.setattr(torch.cuda.Stream, "wait_event", lambda stream, event: None)
    result = torch.zeros(SIZE, device=CUDA)
    read = torch.zeros(SIZE, device=CUDA)
    torch.cuda.synchronize()
    lane = lane_of(lambda value, pause: result.fill_(value))
    hold(device._stream)
    assert lane.submit(Job("a", 8.0))
    assert lane.wait(0.1 if synchronizes else 60) != synchronizes
    if synchronizes:
        let_go(device._stream)
    read.copy_(result_of(lane))
    if not follows:
        torch.cuda.default_stream().synchronize()
    let_go(device._stream)
    torch.cuda.synchronize()
    assert bool((read.cpu() == 8.0).all()) == (synchronizes or follows)


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "with the fault"])
def test_without_record_stream_the_memory_of_a_result_would_be_used_again(
    lane_of: Any, monkeypatch: pytest.MonkeyPatch, fault: bool
) -> None:
    """The owner drops a result that its own stream still reads; the lane's next job may then get that memory."""
    if fault:
        monkeypatch.setattr("vllm_omni_sched.lanes.cuda._tensors_in", lambda value: iter(()))
    lane = lane_of(lambda value, pause: torch.full((SIZE,), value, device=CUDA))
    kept = torch.empty(SIZE, device=CUDA)
    torch.cuda.synchronize()
    assert lane.submit(Job("a", 5.0))
    assert lane.wait(LONG)
    (done,) = lane.poll()
    owner, next_owner = torch.cuda.default_stream(), torch.cuda.Stream()
    hold(owner)
    kept.copy_(done.result)
    del done
    with torch.cuda.stream(next_owner):
        assert lane.submit(Job("b", 9.0))
        assert lane.wait(LONG)
        (after,) = lane.poll()
        next_owner.synchronize()
    let_go(owner)
    torch.cuda.synchronize()
    assert bool((kept.cpu() == 5.0).all()) != fault
    del after


def test_a_job_that_finds_no_memory_fails_alone_and_frees_what_it_had(lane_of: Any) -> None:
    set_memory_bound(64 << 20)

    def work(mebibytes: int, pause: Pause) -> torch.Tensor:
        parts = []
        for _ in range(mebibytes):
            parts.append(torch.full((1 << 20,), 1, dtype=torch.uint8, device=CUDA))
            pause()
        return parts[-1]

    lane = lane_of(work)
    for mebibytes in (2, 200, 3):
        assert lane.submit(Job(str(mebibytes), mebibytes))
    assert lane.drain(LONG)
    small, huge, after = lane.poll()
    assert isinstance(huge.error, LaneWorkError)
    assert "out of memory" in str(huge.error)
    assert small.error is after.error is None
    assert torch.cuda.memory_reserved() <= 40 << 20  # those of the two results; it had been 60


def test_a_cancelled_job_that_waits_is_not_launched(lane_of: Any, device: Any) -> None:
    launched: list[float] = []

    def work(value: float, pause: Pause) -> torch.Tensor:
        launched.append(value)
        return torch.full((SIZE,), value, device=CUDA)

    lane = lane_of(work)
    hold(device._stream)
    for value in (1.0, 2.0, 3.0):
        assert lane.submit(Job(str(value), value))
    assert lane.cancel("2.0")
    let_go(device._stream)
    assert lane.drain(LONG)
    done = {one.key: one for one in lane.poll()}
    assert launched == [1.0, 3.0]
    assert {key for key, one in done.items() if one.error is None} == {"1.0", "3.0"}


def test_what_a_failed_job_had_launched_is_over_before_it_is_reported(lane_of: Any, device: Any) -> None:
    begun = threading.Event()
    value = torch.zeros(SIZE, device=CUDA)

    def work(payload: Any, pause: Pause) -> None:
        value.fill_(4.0)
        begun.set()
        raise ArithmeticError(payload)

    lane = lane_of(work)
    hold(device._stream)
    assert lane.submit(Job("a", "bad"))
    assert begun.wait(LONG)
    assert not lane.wait(0.05)
    let_go(device._stream)
    assert lane.wait(LONG)
    (done,) = lane.poll()
    assert isinstance(done.error, LaneWorkError)
    assert bool((value.cpu() == 4.0).all())


def test_the_owner_on_a_stream_of_higher_priority_goes_first_launch_by_launch(lane_of: Any, device: Any) -> None:
    order: list[str] = []

    def work(payload: Any, pause: Pause) -> None:
        for _ in range(6):
            launch(CUDA, [], lambda _: order.append("lane"))
        ready.set()

    ready = threading.Event()
    lane = lane_of(work)
    owner = torch.cuda.Stream(priority=-1)
    with holding_all():
        assert lane.submit(Job("a", None))
        assert ready.wait(LONG)
        with torch.cuda.stream(owner):
            for _ in range(6):
                launch(CUDA, [], lambda _: order.append("owner"))
    assert lane.drain(LONG)
    owner.synchronize()
    lane.poll()
    assert order == ["owner"] * 6 + ["lane"] * 6


def test_a_lane_of_the_second_device_stays_there(lane_of: Any, num_sms: int | None) -> None:
    second = torch.device("cuda", 1)
    lane = lane_of(lambda value, pause: torch.full((SIZE,), value, device="cuda"), of=CudaDevice(second, num_sms))
    assert lane.submit(Job("a", 6.0))
    assert lane.wait(LONG)
    (done,) = lane.poll()
    assert done.result.device == second
    assert bool((done.result.cpu() == 6.0).all())

"""One suite over all lanes. That of streams runs on a CPU too, with a device that is none, and on CUDA where it is."""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.lanes import HELD, LONG, OWNERS, RELEASED, Work, collect, wait_until_held, work
from tests.support.stream_device import HostDevice
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import LaneClosedError, LaneWorkError
from vllm_omni_sched.lanes import CudaDevice, InlineLane, Job, Lane, LanePool, ProcessLane, StreamLane, ThreadLane


def team(work: Work, capacity: int) -> LanePool:
    """Two processes that hold as many jobs together."""
    return LanePool([ProcessLane(work, capacity // 2), ProcessLane(work, capacity - capacity // 2)])


IN_PLACE = {"test_cancelled_jobs", "test_wait_ends", "test_a_smaller_share", "test_closed_while", "test_closing_does"}


def on_host(work: Work, capacity: int) -> StreamLane:
    return StreamLane(work, capacity, device=HostDevice())


def on_cuda(work: Work, capacity: int) -> StreamLane:
    """Make a lane that moves tensors to the device and back, so that kernels run on the lane's stream."""

    def on_device(payload: Any, pause: Callable[[], None]) -> Any:
        verb, argument = payload
        moved = argument.to("cuda", non_blocking=True) if isinstance(argument, torch.Tensor) else argument
        result = work((verb, moved), pause)
        return result.cpu() if isinstance(result, torch.Tensor) else result

    return StreamLane(on_device, capacity, device=CudaDevice(torch.device("cuda")))


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")


@pytest.fixture(params=[ThreadLane, ProcessLane, team, InlineLane, on_host, pytest.param(on_cuda, marks=needs_cuda)])
def lane(request: pytest.FixtureRequest) -> Iterator[Lane]:
    if request.param is InlineLane and any(request.node.name.startswith(name) for name in IN_PLACE | {"test_a_key"}):
        pytest.skip("nothing ever waits or runs in it")
    RELEASED.clear()
    HELD[:2] = bytes(2)
    lane = request.param(work, capacity=8)
    yield lane
    RELEASED.set()
    lane.close(LONG)
    assert lane.held == len(lane.poll())


def test_jobs_come_back_in_the_order_they_went(lane: Lane) -> None:
    for i in range(8):
        assert lane.submit(Job(str(i), ("double", i)))
    found = [(done.key, done.result) for done in collect(lane, 8)]
    if isinstance(lane, LanePool):
        found.sort()  # each of its lanes has an order of its own
    assert found == [(str(i), 2 * i) for i in range(8)]
    assert lane.held == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5), (0, 4), ()])
def test_tensors_go_and_come_back_as_they_are(lane: Lane, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    lane.submit(Job("a", ("double", tensor)))
    (done,) = collect(lane, 1)
    assert done.result.dtype == (tensor * 2).dtype
    assert torch.equal(done.result, tensor * 2)
    done.result.add_(1)  # the receiver owns it


def test_a_tensor_that_is_not_contiguous(lane: Lane) -> None:
    tensor = torch.arange(12.0).view(3, 4).T[1:]
    lane.submit(Job("a", ("double", tensor)))
    assert torch.equal(collect(lane, 1)[0].result, tensor * 2)


def test_an_error_is_of_its_job_alone(lane: Lane) -> None:
    lane.submit(Job("good", ("double", 1)))
    lane.submit(Job("bad", ("raise", "poisoned image")))
    lane.submit(Job("also good", ("double", 2)))
    found = {done.key: done for done in collect(lane, 3)}
    good, bad, also = (found[key] for key in ("good", "bad", "also good"))
    assert (good.result, also.result) == (2, 4)
    assert isinstance(bad.error, LaneWorkError)
    assert str(bad.error) == "ArithmeticError: poisoned image"
    assert lane.restarts == 0


def test_a_full_lane_refuses_and_takes_again_once_polled(lane: Lane) -> None:
    for i in range(8):
        assert lane.submit(Job(str(i), ("double", i)))
    assert not lane.submit(Job("one too many", ("double", 8)))
    collect(lane, 8)
    assert lane.submit(Job("one too many", ("double", 8)))
    assert collect(lane, 1)[0].result == 16


def test_a_key_is_held_once(lane: Lane) -> None:
    lane.submit(Job("a", ("sleep", 0.05)))
    with pytest.raises(ValueError, match="holds a job with the key 'a'"):
        lane.submit(Job("a", ("double", 1)))
    collect(lane, 1)
    lane.submit(Job("a", ("double", 1)))
    assert collect(lane, 1)[0].result == 2


def test_cancelled_jobs_are_never_reported(lane: Lane) -> None:
    lane.submit(Job("running", ("sleep", 0.1)))
    lane.submit(Job("waiting", ("double", 1)))
    lane.submit(Job("kept", ("double", 2)))
    sleep_seconds(0.03)
    assert lane.cancel("waiting")
    assert lane.cancel("running")
    assert not lane.cancel("waiting")
    assert not lane.cancel("unknown")
    assert lane.held == 1
    assert [done.key for done in collect(lane, 1)] == ["kept"]
    assert lane.drain(LONG)
    assert lane.poll() == []


def test_a_job_that_ended_can_still_be_cancelled(lane: Lane) -> None:
    lane.submit(Job("a", ("double", 1)))
    assert lane.wait(LONG)
    assert lane.cancel("a")
    assert lane.poll() == []
    assert lane.held == 0


def test_a_cancelled_key_can_come_again(lane: Lane) -> None:
    lane.submit(Job("a", ("sleep", 0.05)))
    sleep_seconds(0.01)
    lane.cancel("a")
    until = monotonic_seconds() + LONG
    while not lane.submit(Job("a", ("double", 4))) and monotonic_seconds() < until:
        lane.wait(0.01)
    assert [done.result for done in collect(lane, 1)] == [8]


def test_wait_ends_by_its_timeout(lane: Lane) -> None:
    assert not lane.wait(0.01)
    lane.submit(Job("a", ("sleep", 0.2)))
    assert not lane.wait(0.01)
    assert not lane.drain(0.01)
    assert lane.drain(LONG)
    assert lane.wait(0.0)
    assert len(lane.poll()) == 1


def test_a_smaller_share_takes_longer(lane: Lane) -> None:
    lane.submit(Job("whole", ("slices", 1)))
    (whole,) = collect(lane, 1)
    lane.set_share(0.2)
    lane.submit(Job("fifth", ("slices", 1)))
    (fifth,) = collect(lane, 1)
    # 50 ms of work at a fifth are 250 ms; a busy machine only adds to that
    assert whole.seconds >= 0.05
    assert fifth.seconds >= 0.24


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01])
def test_a_share_is_above_0_and_at_most_1(lane: Lane, share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        lane.set_share(share)


def test_closed_while_busy_everything_is_reported_once(lane: Lane) -> None:
    lane.submit(Job("running", ("hold", None)))
    lane.submit(Job("running in a second process", ("hold", None)))
    lane.submit(Job("waiting", ("double", 1)))
    lane.close(0.05)
    lane.close(0.05)
    reports = lane.poll()
    assert sorted(done.key for done in reports) == ["running", "running in a second process", "waiting"]
    assert all(isinstance(done.error, LaneClosedError) for done in reports)
    assert lane.poll() == []
    with pytest.raises(LaneClosedError):
        lane.submit(Job("late", ("double", 1)))


def test_closing_does_not_wait_for_a_job_that_never_ends(lane: Lane) -> None:
    lane.submit(Job("endless", ("hold", None)))
    wait_until_held()
    lane.close(0.05)
    assert not HELD[1]
    assert [type(done.error) for done in lane.poll()] == [LaneClosedError]


@pytest.mark.parametrize("lane_cls", [ThreadLane, ProcessLane])
def test_capacity_is_at_least_one(lane_cls: type[Lane]) -> None:
    with pytest.raises(ValueError, match="capacity"):
        lane_cls(work, capacity=0)


def test_an_idle_thread_keeps_neither_payload_nor_result_of_its_last_job() -> None:
    lane = ThreadLane(lambda payload, pause: payload * 2)
    payload = torch.ones(8)
    kept = [weakref.ref(payload)]
    assert lane.submit(Job("a", payload))
    del payload
    (done,) = collect(lane, 1)
    kept.append(weakref.ref(done.result))
    del done
    until = monotonic_seconds() + LONG
    while any(one() is not None for one in kept):
        assert monotonic_seconds() < until, "the lane still holds memory of a job that has ended"
        sleep_seconds(0.001)
    lane.close(LONG)


def test_a_renewed_lane_has_dropped_its_jobs_and_sees_what_its_owner_has_changed(lane: Lane) -> None:
    assert lane.submit(Job("before", ("owner's", None)))
    assert collect(lane, 1)[0].result == OWNERS["value"]
    OWNERS["value"] += 1
    for name in ("a", "b", "c"):
        assert lane.submit(Job(name, ("double", 1)))
    lane.renew()
    assert (lane.held, lane.poll()) == (0, [])
    assert lane.submit(Job("a", ("owner's", None)))
    (done,) = collect(lane, 1)
    assert (done.key, done.result) == ("a", OWNERS["value"])
    assert lane.restarts == 0


def test_a_lane_that_sees_its_owner_is_renewed_when_its_work_has_ended(lane: Lane) -> None:
    if not lane.sees_owner or isinstance(lane, InlineLane):
        pytest.skip("its work is killed, or has ended")
    assert lane.submit(Job("a", ("hold", None)))
    wait_until_held()
    threading.Timer(0.05, RELEASED.set).start()
    lane.renew()
    assert HELD[1]
    assert lane.poll() == []

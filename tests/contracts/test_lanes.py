"""One suite over all lanes. That of streams runs on a CPU too, with a device that is none, and on CUDA where it is."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.stream_device import HostDevice
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.errors import LaneClosedError, LaneDiedError, LaneWorkError
from vllm_omni_sched.lanes import CudaDevice, Done, InlineLane, Job, Lane, LaneTeam, ProcessLane, StreamLane, ThreadLane

Work = Callable[[Any, Callable[[], None]], Any]
LONG = 20.0  # seconds nobody should ever wait


def work(payload: Any, pause: Callable[[], None]) -> Any:
    """What the payload says: ``(verb, argument)``."""
    verb, argument = payload
    if verb == "double":
        return argument * 2
    if verb == "raise":
        raise ArithmeticError(argument)
    if verb == "sleep":
        sleep_seconds(argument)
        return argument
    if verb == "slices":  # 50 slices of a millisecond of work each
        for _ in range(50):
            until = monotonic_seconds() + 0.001
            while monotonic_seconds() < until:
                pass
            pause()
        return argument
    if verb == "pid":
        return os.getpid()
    if verb == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(verb)


def team(work: Work, capacity: int) -> LaneTeam:
    """Two processes that hold as many jobs together."""
    return LaneTeam([ProcessLane(work, capacity // 2), ProcessLane(work, capacity - capacity // 2)])


IN_PLACE = {"test_cancelled_jobs", "test_wait_ends", "test_a_smaller_share", "test_closed_while", "test_closing_does"}


def on_host(work: Work, capacity: int) -> StreamLane:
    return StreamLane(work, capacity, device=HostDevice())


def on_cuda(work: Work, capacity: int) -> StreamLane:
    """Tensors go to the device and back, so that kernels run on the lane's stream."""

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
    lane = request.param(work, capacity=8)
    yield lane
    lane.close(2.0)
    assert lane.held == len(lane.poll())


@pytest.fixture
def process_lane() -> Iterator[ProcessLane]:
    lane = ProcessLane(work, capacity=8)
    yield lane
    lane.close(2.0)


def collect(lane: Lane, count: int) -> list[Done]:
    """The next ``count`` reports."""
    found: list[Done] = []
    until = monotonic_seconds() + LONG
    while len(found) < count and monotonic_seconds() < until:
        lane.wait(1.0)
        found += lane.poll()
    assert len(found) == count
    return found


def test_jobs_come_back_in_the_order_they_went(lane: Lane) -> None:
    for i in range(8):
        assert lane.submit(Job(str(i), ("double", i)))
    found = [(done.key, done.result) for done in collect(lane, 8)]
    if isinstance(lane, LaneTeam):
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
    with pytest.raises(ValueError, match="'a' is held"):
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
    lane.submit(Job("running", ("sleep", 1.0)))
    lane.submit(Job("running in a second process", ("sleep", 1.0)))
    lane.submit(Job("waiting", ("double", 1)))
    lane.close(2.0)
    lane.close(2.0)
    reports = lane.poll()
    assert sorted(done.key for done in reports) == ["running", "running in a second process", "waiting"]
    assert all(isinstance(done.error, LaneClosedError) for done in reports)
    assert lane.poll() == []
    with pytest.raises(LaneClosedError):
        lane.submit(Job("late", ("double", 1)))


def test_closing_does_not_wait_for_a_job_that_never_ends(lane: Lane) -> None:
    lane.submit(Job("endless", ("sleep", 3.0)))
    sleep_seconds(0.02)
    started = monotonic_seconds()
    lane.close(0.2)
    assert monotonic_seconds() - started < 2.5
    assert [type(done.error) for done in lane.poll()] == [LaneClosedError]


@pytest.mark.parametrize("lane_cls", [ThreadLane, ProcessLane])
def test_capacity_is_at_least_one(lane_cls: type[Lane]) -> None:
    with pytest.raises(ValueError, match="capacity"):
        lane_cls(work, capacity=0)


def test_a_process_that_dies_takes_one_job_with_it(process_lane: ProcessLane) -> None:
    process_lane.submit(Job("first", ("pid", None)))
    (first,) = collect(process_lane, 1)
    for key, payload in [("a", ("double", 1)), ("poison", ("die", None)), ("b", ("double", 2)), ("c", ("pid", None))]:
        process_lane.submit(Job(key, payload))
    reports = {done.key: done for done in collect(process_lane, 4)}
    assert (reports["a"].result, reports["b"].result) == (2, 4)
    assert isinstance(reports["poison"].error, LaneDiedError)
    assert "SIGKILL" in str(reports["poison"].error)
    assert process_lane.restarts == 1
    assert reports["c"].result == process_lane.pid != first.result


def test_a_process_killed_while_idle_is_replaced(process_lane: ProcessLane) -> None:
    os.kill(process_lane.pid, signal.SIGKILL)
    sleep_seconds(0.05)
    process_lane.submit(Job("a", ("double", 3)))
    assert collect(process_lane, 1)[0].result == 6
    assert process_lane.restarts == 1


class _Undigestible:
    """Ends the process that unpacks it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (3,)


def test_a_payload_that_no_process_survives_fails_and_the_next_is_done(process_lane: ProcessLane) -> None:
    process_lane.submit(Job("bad", ("double", _Undigestible())))
    process_lane.submit(Job("good", ("double", 2)))
    reports = {done.key: done for done in collect(process_lane, 2)}
    assert isinstance(reports["bad"].error, LaneDiedError)
    assert "exit code 3" in str(reports["bad"].error)
    assert reports["good"].result == 4


def test_no_process_outlives_its_lane() -> None:
    lane = ProcessLane(work)
    lane.submit(Job("endless", ("sleep", 60.0)))
    pid = lane.pid
    lane.close(5.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_process_sees_the_memory_of_its_owner_at_the_fork() -> None:
    weights = torch.full((1000, 1000), 3.0)
    lane = ProcessLane(lambda payload, pause: float((weights @ weights).sum()) * payload)
    expected = float((weights @ weights).sum())  # the owner's threads of OpenMP are up now
    lane.submit(Job("a", 2))
    assert collect(lane, 1)[0].result == 2 * expected
    lane.close()


def test_openmp_works_in_the_process_when_the_owner_has_used_it() -> None:
    weights = torch.full((1000, 1000), 3.0)
    expected = float((weights @ weights).sum())
    lane = ProcessLane(lambda payload, pause: float((weights @ weights).sum()))
    lane.submit(Job("a", None))
    assert collect(lane, 1)[0].result == expected
    assert threading.active_count() >= 1
    lane.close()

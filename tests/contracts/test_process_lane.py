"""What only a `ProcessLane` promises: it outlives its processes, and none of them outlives it."""

import gc
import os
import resource
import select
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.descriptors import nothing_left_open, opened
from tests.support.lanes import LONG, collect, work
from vllm_omni_sched.config.errors import LaneDiedError, LaneError
from vllm_omni_sched.lanes import Job, LanePool, ProcessLane


@pytest.fixture
def process_lane() -> Iterator[ProcessLane]:
    lane = ProcessLane(work, capacity=8)
    yield lane
    lane.close(2.0)


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
    end = os.pidfd_open(process_lane.pid)
    os.kill(process_lane.pid, signal.SIGKILL)
    assert select.select([end], [], [], LONG)[0]
    os.close(end)
    process_lane.submit(Job("a", ("double", 3)))
    assert collect(process_lane, 1)[0].result == 6
    assert process_lane.restarts == 1


def kill_all(lane: ProcessLane) -> None:
    """Kill the process at work and the one that would start another; they have ended when this returns."""
    for pid in (lane._fork_server._server_pid, lane.pid):
        end = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([end], [], [], LONG)[0]
        os.close(end)


CALLS: dict[str, Callable[[Any], Any]] = {
    "poll": lambda lane: lane.poll(),
    "submit": lambda lane: lane.submit(Job("b", ("double", 1))),
    "wait": lambda lane: lane.wait(LONG),
    "drain": lambda lane: lane.drain(LONG),
}


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("team", [False, True], ids=["alone", "in-a-team"])
@pytest.mark.parametrize("first", CALLS)
def test_without_a_successor_every_call_says_so(first: str, team: bool, busy: bool) -> None:
    with nothing_left_open():
        lane = ProcessLane(work, capacity=8)
        asked = LanePool([lane]) if team else lane
        asked.submit(Job("a", ("double", 1)))
        collect(asked, 1)
        if busy:
            asked.submit(Job("long", ("sleep", 2 * LONG)))
        kill_all(lane)
        for name in (first, *CALLS):
            with pytest.raises(LaneError):
                CALLS[name](asked)
        asked.cancel("long")
        asked.set_share(0.5)
        asked.close(0.0)


@pytest.mark.parametrize("shape", [(64, 1024), (0, 4)], ids=["tensor", "empty"])
def test_results_that_are_kept_hold_no_descriptor(process_lane: ProcessLane, shape: tuple[int, int]) -> None:
    kept = []
    process_lane.submit(Job("first", ("double", torch.ones(shape))))
    kept += collect(process_lane, 1)
    before = opened()
    for number in range(20):
        process_lane.submit(Job(str(number), ("double", torch.full(shape, float(number)))))
        kept += collect(process_lane, 1)
    assert not opened() - before
    assert mapped() == (len(kept) if shape[0] else 0)
    assert all(torch.equal(done.result, torch.full(shape, 2.0 * number)) for number, done in enumerate(kept[1:]))
    kept.clear()
    assert mapped() == 0


def mapped() -> int:
    """Memory of messages that this process still has."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:omni-sched-lane")


def test_no_descriptor_for_a_result_is_an_error_of_the_lane(process_lane: ProcessLane) -> None:
    process_lane.submit(Job("a", ("double", torch.ones(4))))
    collect(process_lane, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    process_lane.submit(Job("b", ("double", torch.ones(4))))
    select.select([process_lane], [], [], LONG)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(LaneError, match="reading a result of the encoder process failed"):
            process_lane.poll()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


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


def test_the_share_that_a_process_reads_is_one_that_was_set(process_lane: ProcessLane) -> None:
    """While it is changed, too: a zero in between would be divided by."""
    fork_server = process_lane._fork_server
    pid = os.fork()
    if pid == 0:
        while True:
            fork_server.share = 0.25
            fork_server.share = 0.5
    read: set[float] = set()
    try:
        for _ in range(300):
            read.update(fork_server.share for _ in range(1000))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert read <= {0.25, 0.5, 1.0}


def test_the_memory_of_each_job_but_the_first_is_measured() -> None:
    def fill(size: int, pause: Any) -> int:
        return int(torch.ones(size, dtype=torch.uint8).max())

    lane = ProcessLane(fill, capacity=8, measures_memory=True)
    try:
        for key, size in {"warm-up": 64 << 20, "large": 64 << 20, "small": 1 << 10}.items():
            assert lane.submit(Job(key, size))
        assert lane.drain(LONG)
        peaks = {done.key: done.peak_bytes for done in lane.poll()}
    finally:
        lane.close(2.0)
    assert peaks["warm-up"] == 0
    assert 63 << 20 <= peaks["large"] < 128 << 20
    assert peaks["small"] < 16 << 20, "what the job before has freed does not count"

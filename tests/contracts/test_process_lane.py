"""What only a `ProcessLane` promises: it outlives its processes, and none of them outlives it."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.lanes import collect, work
from vllm_omni_sched.clock import sleep_seconds
from vllm_omni_sched.errors import LaneDiedError
from vllm_omni_sched.lanes import Job, ProcessLane


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

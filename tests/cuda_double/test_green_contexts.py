"""Green contexts of the double: counts, streams and errors as NVIDIA documents them, and a lane that has one."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda.bindings import driver

from tests.cuda_double.control import hold, holding, let_go, mend
from tests.cuda_double.green_contexts import (
    NON_BLOCKING,
    SM,
    ask,
    error_of,
    multiprocessors_of,
    new_context,
    new_stream,
    whole,
)
from vllm_omni_sched.config.errors import LaneError
from vllm_omni_sched.lanes import CudaDevice
from vllm_omni_sched.lanes.cuda import green_context

CUDA = torch.device("cuda", 0)
SIZE = 1 << 14


@pytest.mark.parametrize(
    ("least", "groups", "size", "rest"),
    [(0, 16, 8, 4), (1, 16, 8, 4), (8, 16, 8, 4), (9, 8, 16, 4), (60, 2, 64, 4), (70, 1, 72, 60), (130, 0, 0, 132)],
)
def test_a_device_is_split_into_groups_of_equal_size_in_eights(least: int, groups: int, size: int, rest: int) -> None:
    device = whole()
    assert (device.sm.smCount, device.sm.minSmPartitionSize, device.sm.smCoscheduledAlignment) == (132, 8, 8)
    parts, count, remaining = ask("cuDevSmResourceSplitByCount", 20, device, 0, least)
    assert count == groups
    assert [part.sm.smCount for part in parts[:count]] == [size] * groups
    assert remaining.sm.smCount == rest


def test_what_is_no_split_is_refused() -> None:
    device = whole()
    assert error_of("cuDevSmResourceSplitByCount", 1, device, 0, 133) == "CUDA_ERROR_INVALID_VALUE"
    (part,), _, _ = ask("cuDevSmResourceSplitByCount", 1, device, 0, 16)
    assert error_of("cuDevSmResourceSplitByCount", 1, part, 0, 8) == "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"
    without_coscheduling = 1
    assert error_of("cuDevSmResourceSplitByCount", 1, device, without_coscheduling, 8) == "CUDA_ERROR_NOT_SUPPORTED"
    queues = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_WORKQUEUE
    assert error_of("cuDeviceGetDevResource", 0, queues) == "CUDA_ERROR_INVALID_RESOURCE_TYPE"
    assert error_of("cuDeviceGetDevResource", 2, SM) == "CUDA_ERROR_INVALID_DEVICE"


def test_streams_are_non_blocking_and_have_a_queue_and_a_priority_each() -> None:
    context = new_context()
    assert error_of("cuGreenCtxStreamCreate", context, 0, 0) == "CUDA_ERROR_INVALID_VALUE"
    low, high = (torch.cuda.ExternalStream(new_stream(context, priority), CUDA) for priority in (3, -9))
    assert (low.priority, high.priority) == (0, -5)
    one, other = torch.zeros(SIZE, device=CUDA), torch.zeros(SIZE, device=CUDA)
    torch.cuda.synchronize()
    with holding(low):
        with torch.cuda.stream(low):
            one.fill_(1.0)
        with torch.cuda.stream(high):
            other.fill_(2.0)
        high.synchronize()
        other.add_(1.0)
        torch.cuda.default_stream().synchronize()
        assert not low.query()
    low.synchronize()
    assert bool((one.cpu() == 1.0).all())
    assert bool((other.cpu() == 3.0).all())


@pytest.mark.parametrize("device", [0, 1])
def test_events_order_streams_of_two_contexts(device: int) -> None:
    one = torch.cuda.ExternalStream(new_stream(new_context()), CUDA)
    other = torch.cuda.ExternalStream(new_stream(new_context(8, device), -1), torch.device("cuda", device))
    shared, event = torch.zeros(SIZE, device=CUDA), torch.cuda.Event()
    torch.cuda.synchronize()
    hold(one)
    with torch.cuda.stream(one):
        shared.fill_(5.0)
        event.record()
    with torch.cuda.stream(other):
        other.wait_event(event)
        copied = shared.to(other.device, non_blocking=True, copy=True)
    assert not other.query()
    let_go(one)
    other.synchronize()
    assert bool((copied.cpu() == 5.0).all())


def test_the_end_of_a_context_detaches_its_streams() -> None:
    context = new_context()
    handle = new_stream(context)
    stream, event, target = torch.cuda.ExternalStream(handle, CUDA), torch.cuda.Event(), torch.zeros(SIZE, device=CUDA)
    event.record()
    torch.cuda.synchronize()
    hold(stream)
    with torch.cuda.stream(stream):
        target.fill_(4.0)
        ask("cuGreenCtxDestroy", context)
        for call in (stream.synchronize, stream.query, event.record, lambda: stream.wait_event(event)):
            with pytest.raises(RuntimeError, match="the stream is detached: its green context was destroyed"):
                call()
    mend()  # the stream cannot be let go by its handle
    torch.cuda.synchronize()
    assert bool((target.cpu() == 4.0).all())
    assert error_of("cuStreamGetGreenCtx", handle) == "CUDA_ERROR_STREAM_DETACHED"
    assert error_of("cuGreenCtxDestroy", context) == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
    assert error_of("cuCtxFromGreenCtx", context) == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
    assert error_of("cuGreenCtxStreamCreate", context, NON_BLOCKING, 0) == "CUDA_ERROR_CONTEXT_IS_DESTROYED"
    ask("cuStreamDestroy", handle)
    assert error_of("cuStreamDestroy", handle) == "CUDA_ERROR_INVALID_HANDLE"


@pytest.mark.parametrize(("asked", "given"), [(1, 8), (8, 8), (9, 16), (64, 64), (65, 72), (128, 128)])
def test_the_lane_gets_the_next_number_that_the_driver_can_split_off(asked: int, given: int) -> None:
    assert multiprocessors_of(CudaDevice(CUDA, asked)._stream.cuda_stream) == given


def test_without_a_number_the_lane_has_no_context_of_its_own() -> None:
    assert multiprocessors_of(CudaDevice(CUDA)._stream.cuda_stream) is None


def test_two_lanes_of_one_size_are_two_streams_of_one_context() -> None:
    one, other = (CudaDevice(CUDA, 40)._stream.cuda_stream for _ in range(2))
    assert one != other
    assert int(ask("cuStreamGetGreenCtx", one)) == int(ask("cuStreamGetGreenCtx", other))


def test_an_error_of_the_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory = (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None)
    monkeypatch.setattr("torch.cuda.green_contexts._drv.cuGreenCtxCreate", lambda *args: out_of_memory)
    green_context.cache_clear()
    with pytest.raises(LaneError, match=r"cannot have 8 .*CUDA_ERROR_OUT_OF_MEMORY.*\(out of memory\)"):
        CudaDevice(CUDA, 8)


def test_memory_of_a_lane_that_has_ended_is_freed_as_long_as_its_context_stays() -> None:
    """A planted fault ends the context with its lane; the first memory that is freed then ends the process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_double.green_program"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    aborted = -signal.SIGABRT
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == {
        "kept": 0,
        "destroyed, device memory": aborted,
        "destroyed, pinned memory": aborted,
    }
    assert done.stderr.count("invalid resource handle") == 2, done.stderr

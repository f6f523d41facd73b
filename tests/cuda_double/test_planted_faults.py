"""Faults of ordering and of lifetime that a synchronous device would hide: each is planted, and the double shows it.

Every scenario runs twice: as it should be, where the values must be right, and with its fault, where they must be
wrong, or the device must report an error. In the first run the streams are held up in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.cuda_double.control import hold, holding_all, let_go
from tests.cuda_double.green_contexts import ask, new_context, new_stream
from tests.cuda_double.kernels import errors

SIZE = 1 << 18
Scenario = Callable[[bool], torch.Tensor]
SCENARIOS: list[Scenario] = []


def scenario(function: Scenario) -> Scenario:
    """Add a scenario: it gets whether the fault is in, and returns a tensor that should be all 5."""
    SCENARIOS.append(function)
    return function


def full(value: float, device: str = "cuda") -> torch.Tensor:
    return torch.full((SIZE,), value, device=device)


def read_by_another_stream(producer: torch.cuda.Stream, consumer: torch.cuda.Stream, waits: bool) -> torch.Tensor:
    """Return what one stream reads of memory that the other one fills, with or without a wait for its event."""
    shared, event = full(0.0), torch.cuda.Event()
    torch.cuda.synchronize()
    hold(producer)
    with torch.cuda.stream(producer):
        shared.fill_(5.0)
        event.record()
    with torch.cuda.stream(consumer):
        if waits:
            consumer.wait_event(event)
        read = shared.clone()
    if not waits:
        consumer.synchronize()
    let_go(producer)
    torch.cuda.synchronize()
    return read


@scenario
def a_missing_wait_event(fault: bool) -> torch.Tensor:
    return read_by_another_stream(torch.cuda.Stream(), torch.cuda.Stream(), waits=not fault)


@scenario
def an_event_recorded_before_the_work(fault: bool) -> torch.Tensor:
    producer, consumer, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    shared = full(0.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        if fault:
            event.record()
            producer.synchronize()
        hold(producer)
        shared.fill_(5.0)
        if not fault:
            event.record()
    with torch.cuda.stream(consumer):
        consumer.wait_event(event)
        read = shared.clone()
    if fault:
        consumer.synchronize()
    let_go(producer)
    torch.cuda.synchronize()
    return read


@scenario
def an_event_recorded_on_another_stream(fault: bool) -> torch.Tensor:
    producer, consumer, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    shared = full(0.0)
    torch.cuda.synchronize()
    hold(producer)
    with torch.cuda.stream(producer):
        shared.fill_(5.0)
    event.record(torch.cuda.current_stream() if fault else producer)
    with torch.cuda.stream(consumer):
        consumer.wait_event(event)
        read = shared.clone()
    if fault:
        consumer.synchronize()
    let_go(producer)
    torch.cuda.synchronize()
    return read


@scenario
def a_wait_for_an_event_that_is_recorded_later(fault: bool) -> torch.Tensor:
    producer, consumer, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    shared = full(0.0)
    torch.cuda.synchronize()
    hold(producer)
    if fault:
        consumer.wait_event(event)
    with torch.cuda.stream(producer):
        shared.fill_(5.0)
        event.record()
    if not fault:
        consumer.wait_event(event)
    with torch.cuda.stream(consumer):
        read = shared.clone()
    if fault:
        consumer.synchronize()
    let_go(producer)
    torch.cuda.synchronize()
    return read


@scenario
def pinned_memory_read_before_the_copy_has_ended(fault: bool) -> torch.Tensor:
    source, target = full(5.0), torch.zeros(SIZE).pin_memory()
    torch.cuda.synchronize()
    with holding_all():
        target.copy_(source, non_blocking=True)
        if fault:
            return target.clone()
    torch.cuda.synchronize()
    return target.clone()


@scenario
def pinned_memory_written_before_the_copy_has_begun(fault: bool) -> torch.Tensor:
    source, target = torch.full((SIZE,), 5.0).pin_memory(), full(0.0)
    torch.cuda.synchronize()
    with holding_all():
        target.copy_(source, non_blocking=True)
        if fault:
            source.fill_(1.0)
    torch.cuda.synchronize()
    source.fill_(1.0)
    return target


@scenario
def memory_freed_without_record_stream(fault: bool) -> torch.Tensor:
    other, event = torch.cuda.Stream(), torch.cuda.Event()
    shared = full(5.0)
    event.record()
    torch.cuda.synchronize()
    hold(other)
    with torch.cuda.stream(other):
        other.wait_event(event)
        read = shared.clone()
    if not fault:
        shared.record_stream(other)
    del shared
    again = full(9.0)  # of the same size, in the first stream: it gets the same memory if that counts as free
    torch.cuda.current_stream().synchronize()
    let_go(other)
    torch.cuda.synchronize()
    del again
    return read


@scenario
def a_non_blocking_copy_from_a_temporary_on_another_stream(fault: bool) -> torch.Tensor:
    """A result is made on a side stream and dropped there while the default stream still copies it."""
    side = torch.cuda.Stream()
    target = torch.zeros(SIZE, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        made = full(5.0)
    torch.cuda.current_stream().wait_stream(side)
    side.synchronize()
    default = torch.cuda.current_stream()
    hold(default)
    target.copy_(made)
    if not fault:
        made.record_stream(default)
    del made
    with torch.cuda.stream(side):
        again = full(9.0)
        side.synchronize()
    let_go(default)
    torch.cuda.synchronize()
    del again
    return target


@scenario
def a_kernel_that_reads_another_device_without_peer_access(fault: bool) -> torch.Tensor:
    one, other = full(2.0, "cuda:0"), full(3.0, "cuda:1")
    torch.cuda.synchronize(1)
    return one + (other if fault else other.to("cuda:0"))


@scenario
def an_index_out_of_bounds(fault: bool) -> torch.Tensor:
    table = full(5.0)
    read = table[torch.full((SIZE,), SIZE if fault else 0).cuda()]
    torch.cuda.synchronize()
    return read


@scenario
def memory_used_after_it_was_freed(fault: bool) -> torch.Tensor:
    big = torch.full((16 << 20,), 5.0, device="cuda")
    address = {"shape": (16 << 20,), "typestr": "<f4", "data": (big.data_ptr(), False), "version": 2}
    view = torch.as_tensor(type("Stale", (), {"__cuda_array_interface__": address})(), device="cuda")
    if fault:
        del big
        torch.cuda.empty_cache()
    read = view.clone()
    torch.cuda.synchronize()
    return read


@scenario
def a_copy_to_another_device_that_waits_for_the_wrong_stream(fault: bool) -> torch.Tensor:
    producer, event = torch.cuda.Stream("cuda:0"), torch.cuda.Event()
    shared, target = full(0.0, "cuda:0"), full(1.0, "cuda:1")
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    hold(producer)
    with torch.cuda.stream(producer):
        shared.fill_(5.0)
        event.record()
    waiting = torch.cuda.current_stream(1 if fault else 0)  # torch copies on the stream of the source's device
    if not fault:
        waiting.wait_event(event)
    target.copy_(shared, non_blocking=True)
    if fault:
        torch.cuda.synchronize(1)
        waiting.wait_event(event)
    let_go(producer)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    return target


@scenario
def a_missing_wait_event_between_green_contexts(fault: bool) -> torch.Tensor:
    producer, consumer = (torch.cuda.ExternalStream(new_stream(new_context(16))) for _ in range(2))
    return read_by_another_stream(producer, consumer, waits=not fault)


@scenario
def memory_of_a_green_context_freed_without_record_stream(fault: bool) -> torch.Tensor:
    """Let the context's next work have the memory while the default stream still has to read it."""
    lane, owner = torch.cuda.ExternalStream(new_stream(new_context(16))), torch.cuda.default_stream()
    read = full(0.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(lane):
        made = full(5.0)
    lane.synchronize()
    hold(owner)
    read.copy_(made)
    if not fault:
        made.record_stream(owner)
    del made
    with torch.cuda.stream(lane):
        again = full(9.0)
    lane.synchronize()
    let_go(owner)
    torch.cuda.synchronize()
    del again
    return read


@scenario
def a_green_context_destroyed_before_its_stream_is_done_with(fault: bool) -> torch.Tensor:
    context, event = new_context(16), torch.cuda.Event()
    handle = new_stream(context)
    with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
        read = full(5.0)
        if fault:
            ask("cuGreenCtxDestroy", context)
        event.record()
    event.synchronize()
    ask("cuStreamDestroy", handle)
    ask("cuGreenCtxDestroy", context)
    return read


@pytest.mark.parametrize("what", SCENARIOS, ids=lambda function: function.__name__)
def test_as_it_should_be_the_values_are_right(what: Scenario) -> None:
    assert bool((what(False).cpu() == 5.0).all())


@pytest.mark.parametrize("what", SCENARIOS, ids=lambda function: function.__name__)
def test_with_the_fault_they_are_wrong_or_the_device_reports_it(what: Scenario) -> None:
    try:
        found = what(True).cpu()
    except RuntimeError as error:
        reported = str(error)
        errors.clear()
    else:
        reported = "wrong values" if not bool((found == 5.0).all()) else "nothing"
    assert re.search("illegal memory access|device-side assert|stream is detached|wrong values", reported)

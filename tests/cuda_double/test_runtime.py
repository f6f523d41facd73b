"""Test what the double promises: order within a stream, none between streams, and the errors of a device."""

from __future__ import annotations

import pytest
import torch

from tests.cuda_double.control import counts, hold, holding, holding_all, let_go, runtime, set_memory_bound
from tests.cuda_double.kernels import errors, order_of_kernels

SIZE = 4096


def full(value: float, device: str = "cuda") -> torch.Tensor:
    return torch.full((SIZE,), value, device=device)


def all_are(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor.cpu() == value).all())


def test_nothing_runs_before_its_turn_and_queries_tell() -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    target = torch.zeros(SIZE).pin_memory()
    with holding(stream), torch.cuda.stream(stream):
        source = full(3.0)
        target.copy_(source, non_blocking=True)
        event.record()
        assert not event.query()
        assert not stream.query()
        assert all_are(target, 0.0)
    stream.synchronize()
    assert event.query()
    assert all_are(target, 3.0)


def test_an_event_orders_streams_on_one_device_and_between_two() -> None:
    for second in ("cuda:0", "cuda:1"):
        one, other, event = torch.cuda.Stream(), torch.cuda.Stream(second), torch.cuda.Event()
        shared = full(0.0)
        torch.cuda.synchronize()
        hold(one)
        with torch.cuda.stream(one):
            shared.fill_(5.0)
            event.record()
        with torch.cuda.stream(other):
            event.wait(other)
            copied = shared.to(second, non_blocking=True, copy=True)
        assert not other.query()
        let_go(one)
        other.synchronize()
        assert all_are(copied, 5.0)


def test_a_wait_is_for_the_recording_that_there_was() -> None:
    one, two, other, event = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    with holding(one):
        event.record(one)
        other.wait_event(event)
        event.record(two)  # it does not help who waits for the first
        event.synchronize()
        assert not other.query()
    other.synchronize()


def test_the_default_stream_waits_for_blocking_streams_and_not_for_those_of_torch() -> None:
    free = torch.cuda.Stream()
    with holding(free):
        with torch.cuda.stream(free):
            full(1.0)
        torch.cuda.default_stream().synchronize()
        assert all_are(full(2.0), 2.0)


def test_pageable_memory_is_read_at_the_call_and_pinned_memory_is_not() -> None:
    torch.cuda.init()
    pageable, pinned = torch.ones(SIZE), torch.ones(SIZE).pin_memory()
    assert (pageable.is_pinned(), pinned.is_pinned()) == (False, True)
    staged = counts().staged
    with holding_all():
        from_pageable = torch.empty(SIZE, device="cuda").copy_(pageable, non_blocking=True)
        from_pinned = torch.empty(SIZE, device="cuda").copy_(pinned, non_blocking=True)
        pageable.fill_(7.0)
        pinned.fill_(7.0)
    torch.cuda.synchronize()
    assert all_are(from_pageable, 1.0)
    assert all_are(from_pinned, 7.0)
    assert counts().staged == staged + 1


def test_a_copy_to_pageable_memory_has_ended_when_it_returns() -> None:
    target = torch.zeros(SIZE)
    target.copy_(full(4.0), non_blocking=True)
    assert bool((target == 4.0).all())


def test_memory_ends_at_the_bound() -> None:
    set_memory_bound(8 << 20)
    free, total = torch.cuda.mem_get_info()
    assert total == 8 << 20
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free + 1, dtype=torch.uint8, device="cuda")
    assert torch.empty(1 << 20, dtype=torch.uint8, device="cuda").numel() == 1 << 20


def test_an_illegal_access_stays_the_error_of_its_device() -> None:
    big = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    view = torch.as_tensor(_Stale(big.data_ptr(), big.numel()), device="cuda")
    del big
    torch.cuda.empty_cache()
    view.fill_(1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.zeros(4, device="cuda:0")


def break_device(device: int) -> None:
    """Let a kernel touch memory of a device that has been freed, and see the error."""
    big = torch.empty(64 << 20, dtype=torch.uint8, device=f"cuda:{device}")
    with torch.cuda.device(device):
        view = torch.as_tensor(_Stale(big.data_ptr(), big.numel()), device=f"cuda:{device}")
    del big
    torch.cuda.empty_cache()
    view.fill_(1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize(device)


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("current", [0, 1])
def test_an_error_of_one_device_is_not_seen_on_the_other(broken: int, current: int) -> None:
    """A device works on whichever is current, and although the broken one refused this thread in between."""
    other = 1 - broken
    kept = torch.full((SIZE,), 3.0, device=f"cuda:{other}")
    before = torch.zeros(4, device=f"cuda:{broken}")
    stream, event = torch.cuda.Stream(other), torch.cuda.Event()
    torch.cuda.synchronize(other)
    break_device(broken)
    with torch.cuda.device(current):
        for refused in (
            lambda: before.fill_(1.0),
            lambda: torch.zeros(4, device=f"cuda:{broken}"),
            lambda: torch.cuda.Stream(broken).synchronize(),
        ):
            with pytest.raises(RuntimeError, match="illegal memory access"):
                refused()
            with torch.cuda.device(other):
                assert runtime().cudaPeekAtLastError() == 0  # what the next check of a launch would find
            doubled = kept + kept
            stream.wait_stream(torch.cuda.current_stream(other))
            with torch.cuda.stream(stream):
                copied = torch.empty_like(doubled).copy_(doubled)
                event.record(stream)
            event.synchronize()
            assert event.query()
            assert bool((copied.cpu() == 6.0).all())
            assert bool((torch.ones(8).to(f"cuda:{other}").cpu() == 1.0).all())
            torch.cuda.synchronize(other)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize(broken)


class _Stale:
    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def test_a_failing_kernel_is_reported_when_somebody_waits() -> None:
    table = full(1.0)
    with holding_all():
        table[torch.tensor([SIZE + 5]).pin_memory().to("cuda", non_blocking=True)]
    with pytest.raises(RuntimeError, match="device-side assert"):
        torch.cuda.synchronize()
    assert "out of bounds" in errors.pop()


def test_the_operations_give_what_the_processor_gives() -> None:
    left, right = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4) * 2
    index = torch.tensor([2, 0])
    on = [tensor.cuda() for tensor in (left, right, index)]
    for operation in (
        lambda a, b, i: a + b,
        lambda a, b, i: torch.add(a, b, alpha=3),
        lambda a, b, i: (a * 2 - b) / 4,
        lambda a, b, i: torch.cat([a, b], dim=1),
        lambda a, b, i: a[i],
        lambda a, b, i: a.index_select(1, i),
        lambda a, b, i: a.gather(1, i.expand(3, 2)),
        lambda a, b, i: a.T.contiguous(),
        lambda a, b, i: a.to(torch.float64),
        lambda a, b, i: a @ b.T,
        lambda a, b, i: a.sum(),
        lambda a, b, i: a.clone().index_copy_(0, i, b[:2]),
    ):
        expected, found = operation(left, right, index), operation(*on)
        assert found.is_cuda
        assert found.dtype == expected.dtype
        assert torch.equal(found.cpu(), expected)


def test_of_kernels_that_wait_that_of_the_higher_priority_is_next() -> None:
    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-5)
    assert order_of_kernels(low, high, 5) == ["high"] * 5 + ["low"] * 5

"""The host tier's copies, on asynchronous devices: in the order of the step's stream, through pinned memory."""

from __future__ import annotations

import pytest
import torch

from tests.cuda_double.control import hold, let_go
from vllm_omni_sched.engine.ahead.host_messages import HostOrders
from vllm_omni_sched.engine.ahead.host_store import HostStore

ROWS, HIDDEN = 512, 256


@pytest.mark.parametrize("fault", [False, True], ids=["as it is", "with the fault"])
def test_an_encoding_is_kept_as_it_was_though_its_memory_is_used_again_at_once(fault: bool) -> None:
    """With the fault, it is copied on a stream of its own, which the step's does not wait for."""
    store = HostStore(1 << 26)
    step, side = torch.cuda.default_stream(), torch.cuda.Stream()
    cache = {"a": torch.full((ROWS, HIDDEN), 5.0, device="cuda")}
    torch.cuda.synchronize()
    copying = side if fault else step
    hold(copying)
    with torch.cuda.stream(copying):
        store.before_frees(HostOrders(keep=(("a", 1),)), cache)
    del cache["a"]
    again = torch.full((ROWS, HIDDEN), 9.0, device="cuda")  # the same memory, in the order of the step's stream
    if fault:
        step.synchronize()
    let_go(copying)
    with torch.cuda.stream(copying):
        store.restore(HostOrders(restore=("a",)), cache)
    torch.cuda.synchronize()
    assert bool((cache["a"].cpu() == 5.0).all()) != fault
    assert bool((again.cpu() == 9.0).all())


def test_what_is_kept_is_pinned_and_restores_are_timed_by_the_device() -> None:
    store = HostStore(1 << 26)
    tensor = torch.randn(ROWS, HIDDEN, device="cuda")
    expected = tensor.cpu()
    cache = {"a": tensor}
    store.before_frees(HostOrders(keep=(("a", 1),)), cache)
    tensor.zero_()
    cache.clear()
    assert store._kept["a"].tensor.is_pinned()
    hold(torch.cuda.default_stream())
    store.restore(HostOrders(restore=("a",)), cache)
    assert store.take_report().restored_bytes == 0  # the device has not got there
    let_go(torch.cuda.default_stream())
    torch.cuda.synchronize()
    assert cache["a"].is_cuda
    assert torch.equal(cache["a"].cpu(), expected)
    report = store.take_report()
    assert report.restored_bytes == expected.nbytes
    assert report.restored_seconds > 0


def test_a_dropped_encoding_whose_restore_is_still_to_run_comes_back_whole() -> None:
    store = HostStore(1 << 26)
    cache = {name: torch.full((ROWS, HIDDEN), value, device="cuda") for name, value in (("a", 5.0), ("b", 7.0))}
    store.before_frees(HostOrders(keep=(("a", 1),)), cache)
    del cache["a"]
    hold(torch.cuda.default_stream())
    store.restore(HostOrders(restore=("a",)), cache)
    store.before_frees(HostOrders(drop=("a",), keep=(("b", 2),)), cache)  # may get the pinned memory of a
    let_go(torch.cuda.default_stream())
    torch.cuda.synchronize()
    assert bool((cache["a"].cpu() == 5.0).all())
    store.restore(HostOrders(restore=("b",)), cache)
    assert bool((cache["b"].cpu() == 7.0).all())

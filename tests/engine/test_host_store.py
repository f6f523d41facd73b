"""What a worker keeps in host memory: its bound, what it shares and copies, and what it refuses to make up."""

from __future__ import annotations

import pytest
import torch

from vllm_omni_sched.config.errors import EncodingLostError
from vllm_omni_sched.engine.ahead.host_messages import HostOrders, HostReport
from vllm_omni_sched.engine.ahead.host_store import HostStore


def encoding(value: float, embeds: int = 2) -> torch.Tensor:
    return torch.full((embeds, 4), value)


def test_what_is_kept_comes_back_the_same_and_stays():
    store, cache = HostStore(64), {"a": encoding(1.0), "b": encoding(2.0)}
    tensor = cache["a"]
    store.before_frees(HostOrders(keep=(("a", 1),)), cache)
    cache = {}
    for _ in range(2):
        store.restore(HostOrders(restore=("a",)), cache)
        assert cache.pop("a") is tensor  # on a CPU nothing is copied
    assert ("a" in store, "b" in store, store.num_bytes) == (True, False, 32)


def test_it_reports_what_it_kept_what_it_lost_and_how_long_restores_took():
    store = HostStore(40, clock=iter([1.0, 1.5]).__next__)
    cache = {"a": encoding(1.0), "b": encoding(2.0)}
    store.before_frees(HostOrders(keep=(("a", 1), ("b", 2), ("c", 3))), cache)  # no room for b; c is not there
    store.restore(HostOrders(restore=("a",)), cache)
    assert store.take_report() == HostReport({1: ("a", 32)}, {2: "b", 3: "c"}, 2, 32, 0.5)
    assert not store.take_report()
    assert (len(store), store.num_bytes) == (1, 32)


def test_room_is_made_before_it_is_taken():
    store, cache = HostStore(32), {"a": encoding(1.0), "b": encoding(2.0)}
    store.before_frees(HostOrders(keep=(("a", 1),)), cache)
    store.before_frees(HostOrders(drop=("a", "never kept"), keep=(("b", 2),)), cache)
    assert store.take_report().kept == {1: ("a", 32), 2: ("b", 32)}
    assert ("a" in store, "b" in store, store.num_bytes) == (False, True, 32)


def test_a_slice_does_not_keep_the_batch_that_it_is_part_of():
    batch = torch.arange(4000.0).reshape(1000, 4)
    store, cache = HostStore(64), {"a": batch[10:12]}
    store.before_frees(HostOrders(keep=(("a", 1),)), cache)
    batch.zero_()
    store.restore(HostOrders(restore=("a",)), cache)
    assert cache["a"].tolist() == [[40, 41, 42, 43], [44, 45, 46, 47]]
    assert cache["a"].untyped_storage().nbytes() == 32


def test_what_is_not_there_is_an_error_and_never_an_empty_tensor():
    cache: dict[str, torch.Tensor] = {}
    with pytest.raises(EncodingLostError, match="encoding a cannot be restored"):
        HostStore(64).restore(HostOrders(restore=("a",)), cache)
    assert cache == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_copied_to_pinned_memory_and_back_in_the_order_of_the_stream():
    store = HostStore(1 << 26)
    tensor = torch.randn(4096, 1024, device="cuda")
    expected = tensor.cpu()
    cache = {"a": tensor}
    store.before_frees(HostOrders(keep=(("a", 1),)), cache)
    tensor.zero_()  # freed and used for something else, in the order of the stream
    cache.clear()
    store.restore(HostOrders(restore=("a",)), cache)
    torch.cuda.synchronize()
    assert cache["a"].is_cuda
    assert torch.equal(cache["a"].cpu(), expected)
    report = store.take_report()
    assert report.restored_bytes == expected.nbytes
    assert report.restored_seconds > 0

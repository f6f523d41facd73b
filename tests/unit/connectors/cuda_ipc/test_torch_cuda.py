"""What is asked of torch, without a card: its calls are there under these names, and are made in this order.

That they do what they say is checked by `benchmarks.gpu.ipc`.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni_sched.connectors.cuda_ipc import driver, transport
from vllm_omni_sched.connectors.cuda_ipc.driver import NO_COUNTER, Exported, TorchCuda
from vllm_omni_sched.connectors.cuda_ipc.share import ShareReason

SHARED = (0, b"\x02cmemory", 64, 128, b"/torch_1", 3, b"e" * 64, True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    monkeypatch.setattr(
        torch.UntypedStorage, "_release_ipc_counter_cuda", lambda *counter: made.append(("release", *counter))
    )
    return made


def block(shared: tuple[Any, ...] = SHARED) -> Any:
    return SimpleNamespace(untyped_storage=lambda: SimpleNamespace(_share_cuda_=lambda: shared))


@pytest.mark.parametrize("call", ["_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"])
def test_torch_has_the_calls(call: str) -> None:
    """They are private: a torch without them would fail at the first message, so this says it before."""
    assert callable(getattr(torch.UntypedStorage, call))
    assert callable(torch.cuda.Event.from_ipc_handle)
    assert callable(torch.cuda.ipc_collect)


def test_an_exported_block_is_what_torch_gives(calls: list[Any]) -> None:
    exported = TorchCuda().export(block())
    assert exported == Exported(b"\x02cmemory", 64, 128, b"e" * 64, (b"/torch_1", 3))
    assert calls == []
    assert isinstance(exported, Exported)
    TorchCuda().unexport(exported)
    assert calls == [("release", b"/torch_1", 3)]


def test_beyond_its_thousand_events_torch_has_waited_itself(calls: list[Any]) -> None:
    exported = TorchCuda().export(block((*SHARED[:6], b"\0" * 64, False)))
    assert isinstance(exported, Exported)
    assert exported.event == b""


def test_expandable_segments_are_told_by_the_handle_and_are_not_shared(calls: list[Any]) -> None:
    assert TorchCuda().export(block((0, b"\x02esegments", *SHARED[2:]))) is ShareReason.ALLOCATOR
    assert calls == [("release", b"/torch_1", 3)]


@pytest.mark.parametrize(
    ("name", "value", "backend", "why"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "", "native", None),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,expandable_segments:True", "native", ShareReason.ALLOCATOR),
        ("PYTORCH_ALLOC_CONF", "expandable_segments: True", "native", ShareReason.ALLOCATOR),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", "native", None),
        ("PYTORCH_CUDA_ALLOC_CONF", "", "cudaMallocAsync", ShareReason.ALLOCATOR),
    ],
)
def test_allocators_whose_memory_has_no_handle(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, backend: str, why: ShareReason | None
) -> None:
    for other in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: backend)
    assert TorchCuda().obstacle() is why


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("event", [b"e" * 64, b""])
def test_the_stream_waits_before_the_block_is_seen_and_ends_before_anybody_is_told(
    monkeypatch: pytest.MonkeyPatch, event: bytes, finished: bool
) -> None:
    calls: list[Any] = []

    class Storage:
        def nbytes(self) -> int:
            return 64

        def data_ptr(self) -> int:
            return 4096

    class Lease:
        """What is kept."""

    def opened(*arguments: Any) -> Storage:
        calls.append(("map", *arguments))
        storage = Storage()
        weakref.finalize(storage, calls.append, "unmapped")
        return storage

    stream = SimpleNamespace(synchronize=lambda: calls.append("finished"))
    of_handle = SimpleNamespace(wait=lambda on: calls.append(("wait", on is stream)))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch.cuda.Event, "from_ipc_handle", lambda device, handle: of_handle)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    monkeypatch.setattr(torch, "as_tensor", lambda mapped, device: mapped)
    monkeypatch.setattr(driver, "_idle_stream", lambda index: "idle")
    monkeypatch.setattr(torch.cuda, "stream", lambda on: calls.append(on) or nullcontext())
    lease = Lease()
    weakref.finalize(lease, calls.append, "told")
    mapping = TorchCuda().map(1, Exported(b"memory", 64, 128, event, (b"", 0)), [lease])
    del lease
    waited = [("wait", True)] if event else []
    assert calls == [*waited, ("map", 1, b"memory", 64, 128, NO_COUNTER, 0, b"", False)]
    assert mapping.block.__cuda_array_interface__["data"] == (4096, False)
    assert mapping.block.__cuda_array_interface__["shape"] == (64,)
    calls.clear()
    if finished:
        mapping.finished()
    finish = mapping.finished
    del mapping
    assert calls == [*(["finished"] if not finished else []), "idle", "unmapped", "told"]
    finish()  # it has gone: nothing happens


@pytest.mark.parametrize("finished", [False, True])
def test_a_block_of_its_own_is_waited_for_and_held_as_one_of_another_process(
    monkeypatch: pytest.MonkeyPatch, finished: bool
) -> None:
    calls: list[Any] = []

    class Kept:
        """Stands in for memory or a lease."""

        nbytes, data_ptr = staticmethod(lambda: 64), staticmethod(lambda: 4096)

    stream = SimpleNamespace(synchronize=lambda: calls.append("finished"))
    copied = SimpleNamespace(wait=lambda on: calls.append(("wait", on is stream)))
    monkeypatch.setattr(torch.cuda, "device", lambda index: calls.append(index) or nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(torch, "as_tensor", lambda mapped, device: mapped)
    monkeypatch.setattr(driver, "_idle_stream", lambda index: "idle")
    monkeypatch.setattr(torch.cuda, "stream", lambda on: calls.append(on) or nullcontext())
    storage, lease = Kept(), Kept()
    weakref.finalize(storage, calls.append, "let go")
    weakref.finalize(lease, calls.append, "told")
    mapping = TorchCuda().own(1, SimpleNamespace(untyped_storage=lambda made=storage: made), copied, [lease])
    del storage, lease
    assert calls == [1, ("wait", True)]
    assert mapping.block.__cuda_array_interface__["data"] == (4096, False)
    calls.clear()
    if finished:
        mapping.finished()
    del mapping
    assert calls == [*(["finished"] if not finished else []), "idle", "let go", "told"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_nothing_is_taken_into_use() -> None:
    assert not transport.has_cuda()
    assert TorchCuda().uuids() == []
    assert TorchCuda().index_of(torch.zeros(3)) is None
    TorchCuda().collect()

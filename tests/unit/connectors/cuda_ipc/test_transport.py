"""What goes as a handle, and what does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.host_pair import AB, BASE, Pair
from vllm_omni_sched.config.errors import CorruptMessageError, DeviceLostError
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.cuda_ipc import CudaIpcOptions, CudaIpcTransport, transport
from vllm_omni_sched.connectors.cuda_ipc.share import ShareReason
from vllm_omni_sched.connectors.framing import ON_DEVICE, Message, make_message
from vllm_omni_sched.connectors.transport import Status


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE.transpose(0, 2),
        BASE[:, ::2, 1:7],
        BASE[0, 0].expand(5, 8),
        torch.tensor(True),
        torch.zeros(0, 4),
        torch.randn(7, 3).to(torch.bfloat16),
        torch.randn(3, 5, dtype=torch.complex64).conj(),
        torch.ones(9, 2).to(torch.float8_e4m3fn),
        torch.randn(4, requires_grad=True),
    ],
    ids=["contiguous", "transposed", "strided", "expanded", "scalar", "empty", "bf16", "conj", "fp8", "grad"],
)
def test_any_dense_tensor_arrives_as_it_was(pair: Pair, tensor: torch.Tensor) -> None:
    pair.put({"x": tensor, "also": BASE})
    found = pair.get()
    assert (found["x"].dtype, found["x"].shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found["x"].float(), tensor.float()) if not tensor.is_complex() else (found["x"] == tensor).all()
    assert pair.facts()["device_tensors"] == 2


def test_what_lies_on_the_host_travels_beside_it(pair: Pair) -> None:
    sent = {"x": BASE, "n": np.arange(4), "raw": b"abc", "deep": [{"y": torch.ones(3)}, None, "text"]}
    held_bytes = pair.put(sent)
    assert held_bytes > BASE.nbytes
    found = pair.get()
    assert torch.equal(found["x"], BASE)
    assert found["n"].tolist() == [0, 1, 2, 3]
    assert (found["raw"], found["deep"][1:]) == (b"abc", [None, "text"])
    assert found["deep"][0]["y"].tolist() == [1, 1, 1]


def test_tensors_of_a_message_share_one_block(pair: Pair) -> None:
    pair.put({f"{i}": torch.full((10,), i) for i in range(20)})
    assert pair.blocks() == 1
    assert pair.driver.calls.count("export") == 1
    assert [tensor[0].item() for tensor in pair.get().values()] == list(range(20))
    assert pair.facts()["device_tensors"] == 20


def test_messages_without_tensors_go_unchanged(pair: Pair) -> None:
    pair.put({"n": np.arange(100), "s": "text"})
    assert pair.driver.calls == []
    assert pair.get()["n"].sum() == 4950
    assert pair.facts()["device_fallbacks"] == {}


def test_the_sender_may_write_at_once(pair: Pair) -> None:
    tensor = torch.ones(100)
    pair.put({"x": tensor})
    tensor.zero_()
    assert pair.get()["x"].sum() == 100


@pytest.mark.parametrize("pair", [{"min_bytes": 1000}], indirect=True)
def test_few_bytes_go_through_host_memory(pair: Pair) -> None:
    pair.put({"x": torch.zeros(999, dtype=torch.uint8)}, "few")
    pair.put({"x": torch.zeros(900, dtype=torch.uint8), "y": torch.zeros(100, dtype=torch.uint8)}, "together")
    assert pair.get("few")["x"].numel() == 999
    assert pair.get("together")["x"].numel() == 900
    assert (pair.facts()["device_tensors"], pair.facts()["device_fallbacks"]) == (2, {"small": 1})


@pytest.mark.parametrize("pair", [{"names": ("elsewhere",)}], indirect=True)
def test_a_receiver_that_does_not_see_the_device(pair: Pair) -> None:
    pair.put({"x": BASE})
    assert torch.equal(pair.get()["x"], BASE)
    assert pair.facts()["device_fallbacks"] == {"unreachable": 1}


@pytest.mark.parametrize("why", [ShareReason.ALLOCATOR, ShareReason.NO_MEMORY, ShareReason.REFUSED])
def test_what_the_device_cannot_do_goes_through_host_memory(pair: Pair, why: ShareReason, caplog: Any) -> None:
    if why is ShareReason.NO_MEMORY:
        pair.driver.room = 10
    else:
        pair.driver.fails["export"] = RuntimeError("no") if why is ShareReason.REFUSED else why
    for i in range(3):
        pair.put({"x": BASE}, f"{i}")
        assert torch.equal(pair.get(f"{i}")["x"], BASE)
    assert pair.facts()["device_fallbacks"] == {why.value: 3}
    assert (pair.facts()["device_held_bytes"], pair.blocks()) == (0, 0)
    assert caplog.text.count("through host memory") == (why is not ShareReason.NO_MEMORY)


def test_settings_of_the_allocator_are_asked_first(pair: Pair) -> None:
    pair.driver.hindrance = ShareReason.ALLOCATOR
    pair.put({"x": BASE})
    assert pair.driver.calls == []
    assert pair.facts()["device_fallbacks"] == {"allocator": 1}


def test_handles_that_are_damaged_are_a_corrupt_message(pair: Pair) -> None:
    for body in (b"", b"\x01", b"\x92\x91\x92\xc4\x01a\x90\xc0", b"\x92\xc0\xc0"):
        message = Message(AB, "k", body, [np.empty(0, np.uint8)])
        message.flags = ON_DEVICE
        pair.sender.put(message)
        with pytest.raises(CorruptMessageError, match="handle"):
            pair.get()
        assert pair.get() is None


@pytest.mark.parametrize("pair", [{"copy_out": True}], indirect=True)
def test_a_receiver_whose_device_has_no_room_is_not_told_of_damage(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    pair.put({"x": BASE})
    with monkeypatch.context() as broken:
        broken.setattr(torch.Tensor, "clone", fails)
        with pytest.raises(DeviceLostError, match="cannot be opened now: CUDA out of memory"):
            pair.get()
    assert pair.receiver.health().facts["device_lost"] == 1


def test_an_arena_alone_does_not_open_handles(pair: Pair, arena: ArenaOptions) -> None:
    pair.put({"x": BASE})
    plain = ArenaTransport(arena)
    with pytest.raises(CorruptMessageError, match="opens none"):
        plain.get(AB, "k").open()
    plain.close()


def test_without_a_device_it_is_an_arena_and_says_so(arena: ArenaOptions, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(transport, "has_cuda", lambda: False)
    transport._log_missing_device.cache_clear()
    ends = [CudaIpcTransport(CudaIpcOptions(), arena) for _ in range(2)]
    assert caplog.text.count("no CUDA device") == 1
    ends[0].put(make_message(AB, "k", {"x": BASE}))
    assert torch.equal(ends[1].get(AB, "k").open()["x"], BASE)
    health = ends[0].health()
    assert (health.status, health.reason) == (Status.HEALTHY, transport.NO_DEVICE)
    for end in ends:
        end.close()
    assert "closed" in ends[0].health().reason


@pytest.fixture
def blind(arena: ArenaOptions, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaIpcTransport]:
    """Make the transport of a process without a device."""
    monkeypatch.setattr(transport, "has_cuda", lambda: False)
    blind = CudaIpcTransport(CudaIpcOptions(), arena)
    yield blind
    blind.close()


def test_a_receiver_without_a_device_beside_one_that_has_it_gets_host_memory(
    pair: Pair, blind: CudaIpcTransport
) -> None:
    assert blind.get(AB, "nothing") is None
    pair.put({"x": BASE})
    arrival = blind.get(AB, "k")
    assert arrival is not None
    assert torch.equal(arrival.open()["x"], BASE)
    assert pair.facts()["device_fallbacks"] == {"unreachable": 1}


def test_a_receiver_without_a_device_that_comes_too_late_is_told(pair: Pair, blind: CudaIpcTransport) -> None:
    pair.put({"x": BASE})
    with pytest.raises(DeviceLostError, match="this process has none"):
        blind.get(AB, "k")
    assert blind.health().facts["device_lost"] == 1
    assert (pair.facts()["in_flight"], pair.facts()["device_held_bytes"]) == (0, 0)


def test_receivers_that_use_no_device_yet_are_none(pair: Pair, blind: CudaIpcTransport, caplog: Any) -> None:
    pair.receiver.close()
    assert blind.get(AB, "nothing") is None
    pair.put({"x": BASE})
    assert pair.facts()["device_fallbacks"] == {"no_receiver": 1}
    assert "through host memory: " not in caplog.text

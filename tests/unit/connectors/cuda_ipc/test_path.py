"""What goes as a handle, what does not, and what is held how long."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.arena import KIB, FakeClock, small
from tests.support.host_device import HostDriver, device_path
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaPath
from vllm_omni_sched.connectors.base import Edge, Status
from vllm_omni_sched.connectors.cuda_ipc import CudaIpcOptions, CudaIpcPath, path
from vllm_omni_sched.connectors.cuda_ipc.plan import ShareReason
from vllm_omni_sched.connectors.framing import ON_DEVICE, Message, make_message
from vllm_omni_sched.errors import CorruptMessageError, NoRoomError

AB = Edge("a", "b")


class Pair:
    """A sender and a receiver in one process, that has said that it is there."""

    def __init__(self, arena: ArenaOptions, names: tuple[str, ...] = (), **options: Any) -> None:
        self.driver, self.clock = HostDriver(), FakeClock()
        self.sender = device_path(arena, self.driver, self.clock, **options)
        self.receiver = device_path(arena, HostDriver(*names), self.clock, **options)
        assert self.receiver.get(AB, "nothing") is None

    def put(self, payload: Any, key: str = "k") -> int:
        return self.sender.put(make_message(AB, key, payload))

    def get(self, key: str = "k") -> Any:
        arrival = self.receiver.get(AB, key)
        return None if arrival is None else arrival.open()

    def facts(self) -> dict[str, Any]:
        return self.sender.health().facts

    def blocks(self) -> int:
        """Blocks whose memory there is; what is shared is accounted for."""
        facts = self.facts()
        assert (self.driver.exported == 0) is (facts["device_held_bytes"] == 0)
        return len(self.driver.files)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def pair(arena: ArenaOptions, request: pytest.FixtureRequest) -> Any:
    pair = Pair(arena, **getattr(request, "param", {}))
    yield pair
    pair.close()


BASE = torch.arange(2 * 6 * 8).reshape(2, 6, 8)


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


@pytest.mark.parametrize("pair", [{"max_held_bytes": 64 * KIB}], indirect=True)
def test_what_is_held_is_bounded_and_room_comes_back(pair: Pair) -> None:
    for i in range(5):
        pair.put({"x": torch.full((30 * KIB,), i, dtype=torch.uint8)}, f"{i}")
    assert pair.facts()["device_held_bytes"] == 60 * KIB
    assert pair.facts()["device_fallbacks"] == {"held": 3}
    assert [pair.get(f"{i}")["x"][0].item() for i in range(5)] == list(range(5))
    pair.put({"x": torch.zeros(60 * KIB, dtype=torch.uint8)}, "again")  # which looks for room
    assert pair.facts()["device_held_bytes"] == 60 * KIB
    assert pair.get("again")["x"].numel() == 60 * KIB
    assert pair.blocks() == 0


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


@pytest.mark.parametrize("what", ["discarded", "replaced", "expired", "got"])
def test_a_block_ends_with_its_message(pair: Pair, what: str) -> None:
    gc.disable()
    try:
        pair.put({"x": BASE})
        assert (pair.blocks(), pair.facts()["device_held_bytes"]) == (1, BASE.nbytes)
        if what == "discarded":
            assert pair.sender.discard("k") == 1
        elif what == "replaced":
            pair.put({"x": np.zeros(3)})
        elif what == "expired":
            pair.clock.now += 1e4
            pair.sender.reap()
        else:
            pair.get()
            pair.sender.reap()
        assert (pair.blocks(), pair.facts()["device_held_bytes"]) == (0, 0)
        assert pair.facts()["device_held"] == 0
    finally:
        gc.enable()


def test_a_message_that_the_arena_refuses_holds_nothing(arena: ArenaOptions) -> None:
    pair = Pair(small(arena.directory, max_inflight=1))
    pair.put({"x": BASE}, "1")
    with pytest.raises(NoRoomError):
        pair.put({"x": BASE}, "2")
    assert pair.facts()["device_held_bytes"] == BASE.nbytes
    assert pair.blocks() == 1
    pair.close()


def test_a_failure_halfway_holds_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("vllm_omni_sched.connectors.cuda_ipc.sending.copy_to", fails)
    with pytest.raises(RuntimeError, match="illegal"):
        pair.put({"x": BASE})
    assert (pair.facts()["device_held_bytes"], pair.blocks()) == (0, 0)


def test_at_close_what_nobody_has_got_is_on_the_host_as_it_was_sent(pair: Pair) -> None:
    beside, small_one = np.arange(5), {"x": BASE.transpose(0, 1), "n": np.arange(5), "s": "text"}
    pair.put(small_one | {"n": beside}, "a")
    pair.put({"n": np.ones(3)}, "b")
    pair.put({"x": BASE}, "c")
    held = pair.get("c")
    beside[:] = 9
    pair.sender.close()
    found = pair.get("a")
    assert torch.equal(found["x"], BASE.transpose(0, 1))
    assert (found["n"].tolist(), found["s"]) == ([0, 1, 2, 3, 4], "text")
    assert pair.get("b")["n"].sum() == 3
    assert torch.equal(held["x"], BASE)
    assert pair.receiver.health().facts["device_opened"] == 1


def test_handles_that_are_damaged_are_a_corrupt_message(pair: Pair) -> None:
    for body in (b"", b"\x01", b"\x92\x91\x92\xc4\x01a\x90\xc0", b"\x92\xc0\xc0"):
        message = Message(AB, "k", body, [np.empty(0, np.uint8)])
        message.flags = ON_DEVICE
        pair.sender.put(message)
        with pytest.raises(CorruptMessageError, match="handle"):
            pair.get()
        assert pair.get() is None


def test_an_arena_alone_does_not_open_handles(pair: Pair, arena: ArenaOptions) -> None:
    pair.put({"x": BASE})
    plain = ArenaPath(arena)
    with pytest.raises(CorruptMessageError, match="opens none"):
        plain.get(AB, "k").open()
    plain.close()


def test_copies_of_the_arena_keep_the_block_as_long(arena: ArenaOptions) -> None:
    pair = Pair(small(arena.directory, copy_out=True), copy_out=True)
    pair.put({"x": BASE, "n": np.arange(3)})
    arrival = pair.receiver.get(AB, "k")
    assert pair.blocks() == 1
    found = arrival.open()
    del arrival
    pair.sender.reap()
    assert found["n"].tolist() == [0, 1, 2]
    assert torch.equal(found["x"], BASE)
    pair.close()


def test_without_a_device_it_is_an_arena_and_says_so(arena: ArenaOptions, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(path, "has_cuda", lambda: False)
    path._say_no_device.cache_clear()
    ends = [CudaIpcPath(CudaIpcOptions(), ArenaPath(arena)) for _ in range(2)]
    assert caplog.text.count("no CUDA device") == 1
    ends[0].put(make_message(AB, "k", {"x": BASE}))
    assert torch.equal(ends[1].get(AB, "k").open()["x"], BASE)
    health = ends[0].health()
    assert (health.status, health.reason) == (Status.HEALTHY, path.NO_DEVICE)
    for end in ends:
        end.close()
    assert "closed" in ends[0].health().reason


@pytest.mark.parametrize("pair", [{"max_held_bytes": 8 * KIB}], indirect=True)
def test_many_threads_send_tensors_and_nothing_stays_held(pair: Pair) -> None:
    threads, each = 4, 40

    def send(thread: int) -> None:
        for i in range(each):
            message = make_message(AB, f"{thread}-{i}", {"x": torch.full((500,), thread * each + i)})
            pair.sender.put(message, deadline=1e9)

    def receive(thread: int) -> list[int]:
        found = []
        for i in range(each):
            while (payload := pair.get(f"{thread}-{i}")) is None:
                pass
            assert payload["x"].unique().numel() == 1
            found.append(int(payload["x"][0]))
        return found

    with ThreadPoolExecutor(2 * threads) as pool:
        sent = [pool.submit(send, thread) for thread in range(threads)]
        got = [pool.submit(receive, thread) for thread in range(threads)]
        for future in sent:
            future.result()
        assert [future.result() for future in got] == [
            [thread * each + i for i in range(each)] for thread in range(threads)
        ]
    pair.sender.reap()
    facts = pair.facts()
    assert facts["device_tensors"] + facts["device_fallbacks"].get("held", 0) == threads * each
    assert facts["device_tensors"] > 0
    assert (facts["device_held_bytes"], pair.blocks()) == (0, 0)

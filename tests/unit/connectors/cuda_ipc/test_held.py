"""What is held on the device, and how long."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.arena import KIB, small
from tests.support.host_pair import AB, BASE, Pair
from vllm_omni_sched.config.errors import NoRoomError
from vllm_omni_sched.connectors.arena import ArenaOptions
from vllm_omni_sched.connectors.framing import make_message


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


def test_what_waits_and_what_is_held_is_told_by_edge(pair: Pair) -> None:
    for key in ("k", "l"):
        pair.put({"x": BASE}, key)
    assert list(pair.sender.traffic()) == [("cuda_ipc", AB)]
    assert len(pair.sender.traffic()["cuda_ipc", AB].waiting) == 2
    arrival = pair.receiver.get(AB, "k")
    told = pair.sender.traffic()["cuda_ipc", AB]
    assert (len(told.waiting), len(told.held)) == (1, 1)
    del arrival
    assert pair.sender.traffic()["cuda_ipc", AB].held == []

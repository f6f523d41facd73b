"""What a path promises, while everybody is well: with a real master, two clients in one process."""

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.mooncake import Deployment, arrived, received
from tests.support.mooncake_faults import wait_for
from vllm_omni_sched.config.errors import CorruptMessageError, ReceiverBehindError, TransportClosedError
from vllm_omni_sched.connectors.edge import Edge, name_of
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.mooncake import MooncakeTransport
from vllm_omni_sched.connectors.mooncake.store import Names
from vllm_omni_sched.connectors.transport import Status

pytestmark = pytest.mark.usefixtures("inside")
EDGE, OTHER = Edge("0", "1"), Edge("1", "2")
MIB = 1 << 20


def put(path: MooncakeTransport, key: str, payload: Any, edge: Edge = EDGE, deadline: float | None = None) -> int:
    return path.put(make_message(edge, key, payload), deadline)


def test_nothing_is_there_before_it_is_put(receiver: MooncakeTransport) -> None:
    assert receiver.get(EDGE, "never") is None


@pytest.mark.parametrize("nbytes", [0, 1, 1000, MIB, 64 * MIB, 150 * MIB])
def test_bytes_arrive(sender: MooncakeTransport, receiver: MooncakeTransport, nbytes: int) -> None:
    """The last size is larger than the registered region: it has memory of its own on both sides."""
    sent = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    assert put(sender, "bytes", sent) >= nbytes
    got = received(receiver, EDGE, "bytes")
    assert np.array_equal(got, sent)
    assert receiver.get(EDGE, "bytes") is None
    del got
    assert receiver.health().facts["buffers_outside"] == 0


@pytest.mark.parametrize("payload", [b"", {}, None, "", []])
def test_a_payload_of_nothing_arrives(sender: MooncakeTransport, receiver: MooncakeTransport, payload: Any) -> None:
    put(sender, "nothing", payload)
    arrival = arrived(receiver, EDGE, "nothing")
    assert arrival is not None
    assert arrival.open() == payload


def test_tensors_arrive_as_views(sender: MooncakeTransport, receiver: MooncakeTransport) -> None:
    payload = {"hidden": torch.randn(7, 300, 5).to(torch.bfloat16), "ids": torch.arange(9), "text": "ok"}
    put(sender, "k", payload)
    got = received(receiver, EDGE, "k")
    assert torch.equal(got["hidden"], payload["hidden"])
    assert torch.equal(got["ids"], payload["ids"])
    assert got["text"] == "ok"


def test_memory_of_a_message_is_its_receivers_until_the_last_view_is_gone(
    sender: MooncakeTransport, receiver: MooncakeTransport
) -> None:
    gc.collect()
    free = receiver.health().facts["buffer_used_bytes"]
    put(sender, "held", {"a": torch.full((MIB,), 7, dtype=torch.uint8), "b": torch.zeros(10)})
    held = received(receiver, EDGE, "held")
    view = held["a"][1000:]
    del held
    for i in range(150):  # more than the region
        put(sender, f"other{i}", np.full(MIB, 9, np.uint8))
        received(receiver, EDGE, f"other{i}")
    assert bool((view == 7).all())
    assert receiver.health().facts["buffer_used_bytes"] >= free + MIB
    del view
    assert receiver.health().facts["buffer_used_bytes"] == free


def test_the_same_key_on_two_edges_is_two_messages(sender: MooncakeTransport, receiver: MooncakeTransport) -> None:
    put(sender, "same", "first", EDGE)
    put(sender, "same", "second", OTHER)
    assert received(receiver, OTHER, "same") == "second"
    assert received(receiver, EDGE, "same") == "first"


def test_the_last_put_is_what_arrives(sender: MooncakeTransport, receiver: MooncakeTransport) -> None:
    """Mooncake's own `put` says 0 for a key that is there, and keeps what it had."""
    for payload in ("one", "two!", "three", "four"):
        put(sender, "again", payload)
    assert received(receiver, EDGE, "again") == "four"
    time.sleep(0.2)  # one of the others would be found by now
    assert receiver.get(EDGE, "again") is None
    put(sender, "again", "five")
    assert received(receiver, EDGE, "again") == "five"


def test_what_a_process_before_us_left_is_replaced(
    shared: Deployment, sender: MooncakeTransport, receiver: MooncakeTransport
) -> None:
    before = shared.path()
    put(before, "left", "old")
    put(sender, "left", "new, and longer")
    assert received(receiver, EDGE, "left") == "new, and longer"
    time.sleep(0.1)  # the old one would be found by now
    assert receiver.get(EDGE, "left") is None


def test_what_is_discarded_does_not_arrive(sender: MooncakeTransport, receiver: MooncakeTransport) -> None:
    put(sender, "abort", 1, EDGE)
    put(sender, "abort", 2, OTHER)
    put(sender, "stays", 3)
    assert sender.discard("abort") == 2
    assert sender.discard("abort") == 0
    assert receiver.get(EDGE, "abort") is None
    put(sender, "abort", "after")
    assert received(receiver, EDGE, "abort") == "after"
    assert received(receiver, EDGE, "stays") == 3
    assert sender.discard("stays") == 0


def test_looking_for_what_is_not_there_is_cheap_for_the_master(receiver: MooncakeTransport) -> None:
    names = [f"soon{i}" for i in range(40)]
    before, asked, looks = receiver.health().facts["looks"], 0, 0
    began = time.monotonic()
    while looks < 100:
        for name in names:
            assert receiver.get(EDGE, name) is None
            asked += 1
        looks = receiver.health().facts["looks"] - before
    assert looks < 2 * (time.monotonic() - began) / 5e-3
    assert asked > 10 * looks


def test_who_waits_is_served_soon(sender: MooncakeTransport, receiver: MooncakeTransport) -> None:
    assert receiver.get(EDGE, "late") is None
    took = []
    waiter = threading.Thread(target=lambda: took.append((received(receiver, EDGE, "late"), time.monotonic())))
    waiter.start()
    time.sleep(0.5)  # it has looked for it for a while
    put(sender, "late", "here")
    start = time.monotonic()
    waiter.join()
    assert took[0][0] == "here"
    assert took[0][1] - start < 0.5


def test_each_message_is_got_once_by_two_receivers(
    shared: Deployment, sender: MooncakeTransport, receiver: MooncakeTransport
) -> None:
    second, got, count = shared.path(), [], 60
    done = threading.Event()

    def receives(path: MooncakeTransport) -> None:
        with shared.inside():
            while not done.is_set():
                for i in range(count):
                    if (arrival := path.get(EDGE, f"race{i}")) is not None:
                        got.append(arrival.open())

    threads = [threading.Thread(target=receives, args=(path,)) for path in (receiver, second)]
    for thread in threads:
        thread.start()
    try:
        for i in range(count):
            put(sender, f"race{i}", i)
        wait_for(lambda: len(got) >= count)
        time.sleep(0.2)  # what is got twice is got by now
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert sorted(got) == list(range(count))


def test_replacing_while_somebody_reads_never_mixes(
    shared: Deployment, sender: MooncakeTransport, receiver: MooncakeTransport
) -> None:
    """Each message is all one number, of its own size; numbers only grow."""
    done, seen, mixed = threading.Event(), [], []

    def receives() -> None:
        with shared.inside():
            while not done.is_set():
                if (arrival := receiver.get(EDGE, "mixed")) is not None:
                    got = arrival.open()
                    seen.append(int(got[0]))
                    if not (got == got[0]).all():
                        mixed.append(got)

    thread = threading.Thread(target=receives)
    thread.start()
    try:
        for number in range(150):
            put(sender, "mixed", np.full(MIB + 64 * (number % 3), number, np.uint8))
        wait_for(lambda: not sender.reap() and not sender.health().facts["in_flight"])
    finally:
        done.set()
        thread.join()
    assert not mixed
    assert seen == sorted(set(seen))
    assert seen[-1] == 149


def test_a_message_that_nobody_gets_expires_and_is_counted(
    shared: Deployment, receiver: MooncakeTransport, caplog: pytest.LogCaptureFixture
) -> None:
    short = shared.path(ttl_seconds=0.3)
    put(short, "old", "news")
    wait_for(lambda: short.health().facts["expired"])
    assert receiver.get(EDGE, "old") is None
    assert "because it was not received in time" in caplog.text
    health = short.health()
    assert (health.status, health.reason) == (Status.DEGRADED, "1 expired")
    assert health.facts["in_flight"] == 0


def test_what_is_no_message_of_ours_is_said_and_removed(
    shared: Deployment, sender: MooncakeTransport, receiver: MooncakeTransport
) -> None:
    stored = Names("omni").plain(name_of(EDGE, "bad"))
    raw = sender._store._client
    assert raw.put(stored, b"x" * 1000) == 0
    with pytest.raises(CorruptMessageError):
        received(receiver, EDGE, "bad")
    assert raw.is_exist(stored) == 0
    assert receiver.health().reason == "1 corrupt"
    receiver._inbox.counts.corrupt = 0


def test_copies_out_when_asked_for(shared: Deployment, sender: MooncakeTransport) -> None:
    path = shared.path(copy_out=True)
    put(sender, "copied", np.arange(100000))
    got = received(path, EDGE, "copied")
    assert path.health().facts["buffer_used_bytes"] == 0
    assert np.array_equal(got, np.arange(100000))


def test_put_waits_for_the_receiver_of_its_edge(shared: Deployment, receiver: MooncakeTransport) -> None:
    path = shared.path(max_inflight=2)
    put(path, "w0", 0)
    put(path, "w1", 1)
    with pytest.raises(ReceiverBehindError, match="max_inflight"):
        put(path, "w2", 2)
    put(path, "elsewhere", 2, OTHER)
    threading.Timer(0.3, lambda: received(receiver, EDGE, "w0")).start()
    start = time.perf_counter()
    put(path, "w2", 2, deadline=start + 20)
    assert 0.1 < time.perf_counter() - start < 10
    assert [received(receiver, EDGE, key) for key in ("w1", "w2")] == [1, 2]
    assert received(receiver, OTHER, "elsewhere") == 2


def test_after_close_everything_says_so(shared: Deployment) -> None:
    path = shared.path()
    path.close()
    path.close()
    with pytest.raises(TransportClosedError):
        put(path, "k", 1)
    with pytest.raises(TransportClosedError):
        path.get(EDGE, "k")
    assert (path.discard("k"), path.reap()) == (0, 0)
    assert path.health().status is Status.CLOSED


def test_what_was_got_outlives_the_path(shared: Deployment, sender: MooncakeTransport) -> None:
    path = shared.path()
    put(sender, "kept", torch.arange(100000))
    got = received(path, EDGE, "kept")
    path.close()
    gc.collect()
    assert torch.equal(got, torch.arange(100000))


def test_what_waits_and_what_was_got_is_told_by_edge(shared: Deployment, receiver: MooncakeTransport) -> None:
    sender = shared.path()  # nothing was got from it before
    for key in "ab":
        put(sender, key, b"x" * 1000)
    (traffic,) = sender.traffic().values()
    assert sum(one.nbytes for one in traffic.waiting) >= 2000
    assert (len(traffic.waiting), traffic.held, traffic.got_at) == (2, [], None)
    assert received(receiver, EDGE, "a") == b"x" * 1000
    for _ in range(1000):
        sender.reap()
        if (traffic := sender.traffic()[sender.name, EDGE]).got_at is not None:
            break
        time.sleep(0.01)
    assert (len(traffic.waiting), traffic.got_put_at is not None) == (1, True)

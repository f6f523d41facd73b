"""What becomes of messages and memory when a put, a get or a close is interrupted, or there is no room."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.support.mooncake import Deployment, received
from tests.support.mooncake_faults import EDGE, MIB, SOON, put, stop_asking, wait_for
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import NoRoomError, RendezvousError
from vllm_omni_sched.connectors.mooncake import MooncakeTransport
from vllm_omni_sched.connectors.mooncake.store import NO_ROOM, MasterGoneError

CLOSES = """
import threading
from vllm_omni_sched.config.errors import ConnectorError
said, ended = [], []
def busy(number):
    try:
        for i in range(10**6):
            path.put(make_message(edge, f"{number}-{i}", np.zeros(1 << 20, np.uint8)))
            while path.get(edge, f"{number}-{i}") is None:
                pass
    except ConnectorError as error:
        said.append(type(error).__name__)
threads = [threading.Thread(target=busy, args=(number,)) for number in range(6)]
for thread in threads:
    thread.start()
time.sleep(1)  # all of them are at it
path.close()
for thread in threads:
    thread.join()
say(*sorted(set(said)), len(said))
"""


@pytest.mark.parametrize("fails", ["to replace", "to link"])
def test_a_put_that_fails_half_way_leaves_nothing(own: Deployment, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    sender = own.path()
    stop_asking(sender)
    put(sender, "k", np.zeros(MIB, np.uint8))
    remove, put_from, failed, stored = sender._store.remove, sender._store.put_from, [], []

    def remove_fails(keys: list[str]) -> list[int]:
        if fails == "to replace" and not failed:
            failed.append(keys)
            raise MasterGoneError("gone for a moment")
        return remove(keys)

    def link_fails(key: str, *arguments: Any) -> int:
        if fails == "to link" and key.endswith("/link"):
            failed.append(key)
            return NO_ROOM
        stored.append(key)
        return put_from(key, *arguments)

    monkeypatch.setattr(sender._store, "remove", remove_fails)
    monkeypatch.setattr(sender._store, "put_from", link_fails)
    with pytest.raises(RendezvousError):
        put(sender, "k", np.ones(MIB, np.uint8))
    assert (len(failed), len(stored)) == (1, 1)
    assert sender._store.exist(stored) == [False]
    assert sender.discard("k") == (fails == "to replace")
    assert sender._buffers.used_bytes == 0


def test_what_was_taken_after_all_is_there_for_the_next_get(own: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library removed the message for us after we gave up waiting: nobody else can have it any more."""
    sender, receiver = own.path(), own.path(call_timeout_seconds=0.3)
    put(sender, "late", np.arange(MIB))
    claim = receiver._store.claim

    def claims_slowly(key: str) -> int:
        time.sleep(1.0)  # longer than the path waits for a call
        return claim(key)

    monkeypatch.setattr(receiver._store, "claim", claims_slowly)
    start = time.monotonic()
    while receiver.health().facts["unreachable"] == 0:
        assert receiver.get(EDGE, "late") is None
    assert time.monotonic() - start < 0.9
    assert np.array_equal(received(receiver, EDGE, "late"), np.arange(MIB))
    wait_for(lambda: sender.health().facts["consumed"] == 1)
    assert receiver.get(EDGE, "late") is None


def fill(path: MooncakeTransport) -> tuple[int, str]:
    """Put messages of 1 MiB until there is no room: how many, and what is said then."""
    for count in range(1000):
        try:
            put(path, f"m{count}", np.full(MIB, count, np.uint8))
        except NoRoomError as error:
            return count, str(error)
    raise AssertionError("the store never was full")


def test_a_full_store_says_so_and_takes_more_once_something_was_got(mooncake: None) -> None:
    """Meanwhile the master evicts what is not pinned, got or not: above 90%, here above 50%."""
    with Deployment(eviction_high_watermark_ratio=0.5, default_kv_lease_ttl=1) as deployment, deployment.inside():
        sender, receiver = deployment.path(segment="64MB"), deployment.path(segment=0)
        count, said = fill(sender)
        assert said.startswith("no room for")
        assert "raise its `segment`" in said
        assert count > 50
        time.sleep(2)  # until leases are over, and the master may evict
        threading.Timer(0.3, lambda: received(receiver, EDGE, "m0")).start()
        put(sender, "more", np.full(MIB, 99, np.uint8), deadline=monotonic_seconds() + SOON)
        assert receiver.health().facts["got"] == 1
        for i in range(1, count):
            assert (received(receiver, EDGE, f"m{i}") == i).all()
        assert (received(receiver, EDGE, "more") == 99).all()


def test_a_lease_shorter_than_the_transfer_loses_nothing(mooncake: None) -> None:
    with Deployment(default_kv_lease_ttl=1) as deployment, deployment.inside():
        sender, receiver = deployment.path(), deployment.path()
        sent = np.random.default_rng(0).integers(0, 256, 64 * MIB, np.uint8)
        put(sender, "slow", sent)
        assert np.array_equal(received(receiver, EDGE, "slow"), sent)


def test_closing_while_calls_are_in_flight(own: Deployment) -> None:
    """No call may go into the library after its close: it would kill the process."""
    child = own.child(CLOSES)
    assert child.heard() == "TransportClosedError 6"
    child.process.stdin.close()  # type: ignore[union-attr]
    assert child.process.wait(SOON) == 0, child.errors()[-2000:]

"""Messages that move while others send and receive, and while disks are full."""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
from collections.abc import Callable

import pytest

from tests.support.arena import EDGE, KIB, LONG, pixels
from tests.support.processes import Process, Processes
from tests.support.tiers import DOWN, MANY, PAYLOAD, small_tiers
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import NoRoomError, ReceiverBehindError, RendezvousError
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.tiers.carry import Stage
from vllm_omni_sched.connectors.tiers.duplicates import Tickets
from vllm_omni_sched.connectors.transport import Status


def test_two_thousand_messages_and_an_arena_that_holds_a_hundred(root: str) -> None:
    """All of them wait at once; the sender never does."""
    sender, receiver = small_tiers(root, moves_itself=True, **DOWN), small_tiers(root)
    most = 0
    for i in range(2000):
        sender.put(make_message(EDGE, f"m{i}", {"x": pixels(i % 251, PAYLOAD)}))
        most = max(most, sender.ledger.used[0, "image"])
    assert 0 < most <= 800 * KIB
    until = monotonic_seconds() + LONG
    while not sender.health().facts["moved"] and monotonic_seconds() < until:
        sleep_seconds(0.001)
    facts = sender.health().facts
    assert facts["in_flight"] == 2000
    assert sum(facts["tier_messages"].values()) == 2000
    assert facts["tier_messages"]["disk"] >= 1900
    assert facts["arena"]["pools"]["image"]["used_bytes"] <= 800 * KIB
    assert facts["moved"]["arena->disk high_water"] > 0
    assert facts["placed"]["disk no_room"] + facts["placed"]["arena first"] == 2000
    assert sender._worker is not None
    thread = sender._worker._thread
    assert thread is not None
    assert thread.is_alive()
    for i in random.Random(0).sample(range(2000), 2000):
        until = monotonic_seconds() + LONG
        while (arrival := receiver.get(EDGE, f"m{i}")) is None and monotonic_seconds() < until:
            sleep_seconds(0.0002)
        assert arrival is not None, i
        assert (arrival.open()["x"] == i % 251).all()
        del arrival
    facts = sender.health().facts
    assert (facts["in_flight"], facts["consumed"]) == (0, 2000)
    assert facts["moves_failed"] == facts["refused"] == 0
    assert receiver.health().facts["got"] == 2000
    for path in (sender, receiver):
        path.close()
    assert not thread.is_alive()


def test_receivers_that_ask_while_messages_move(start: Callable[..., Process], root: str) -> None:
    """Three receivers in two processes ask for everything; each message is got by one of them."""
    sender, count = small_tiers(root, moves_itself=True, expected_wait_seconds=0.05, soon_seconds=10.0, **DOWN), 300
    processes = [start(), start()]
    for process in processes:
        process.begin("receive_all", count, processes.index(process))
    receiver, found = small_tiers(root), []
    ended = threading.Event()

    def receive() -> None:
        while not ended.is_set():
            for i in range(count):
                if i not in found and (arrival := receiver.get(EDGE, f"{i}")) is not None:
                    assert (arrival.open()["x"] == i % 251).all()
                    found.append(i)

    thread = threading.Thread(target=receive)
    thread.start()
    for i in range(count):
        message = make_message(EDGE, f"{i}", {"x": pixels(i % 251, 8 + i * 337 % 9000)})
        sender.put(message, monotonic_seconds() + LONG)
    for i in range(2):
        sender.put(make_message(EDGE, f"end {i}", {"x": pixels(0, 1)}))
    got = [process.result() for process in processes]
    until = monotonic_seconds() + LONG
    while len(found) + sum(map(len, got)) < count and monotonic_seconds() < until:
        sleep_seconds(0.001)
    ended.set()
    thread.join()
    assert sorted([*found, *got[0], *got[1]]) == list(range(count))
    for path in (sender, receiver):
        path.close()


def test_a_disk_that_is_full_leaves_messages_where_they_are(all_processes: Processes, root: str) -> None:
    process = all_processes.start()
    try:
        process.own_mount(root, 4 * 1024 * KIB)
    except OSError as error:
        pytest.skip(str(error))
    process.open_tiers(root, moves_itself=True, high_water=0.5, low_water=0.1)
    process.fill(f"{root}/fill", process.free_bytes(root) - 900 * KIB)  # the arena and a few files
    with pytest.raises(NoRoomError, match=r"in any tier: arena: .*; disk: .*"):
        process.put_many(400, PAYLOAD)
    status, _, facts = process.health()
    assert status == "sick"
    assert facts["moves_failed"] == facts["expired"] == 0
    there = facts["in_flight"]
    assert there == sum(facts["tier_messages"].values()) > 40
    for i in range(there):
        until = monotonic_seconds() + LONG
        while (found := process.get(f"m{i}")) is None and monotonic_seconds() < until:
            sleep_seconds(0.001)  # it was about to move
        assert found == (PAYLOAD, i % 251)
    assert process.health()[2]["moves_refused"] < 10  # it was not tried again and again
    process.remove(f"{root}/fill")
    assert process.put("again", PAYLOAD, 1) > 0
    process.close()


def test_nothing_is_written_to_take_a_ticket(root: str) -> None:
    """As when there are two copies of a message and the disk is full."""
    sender, receiver = small_tiers(root, **DOWN), small_tiers(root)
    for i in range(MANY):
        sender.put(make_message(EDGE, f"m{i}", {"x": pixels(i, PAYLOAD)}))
    assert receiver.get(EDGE, "none") is None
    item, move = sender.moves()[0]
    going = sender.carry(item, move)
    assert [next(going), next(going)] == [Stage.LEASED, Stage.DOUBLED]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        arrival = receiver.get(EDGE, item.key)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert arrival is not None
    assert (arrival.open()["x"] == int(item.key[1:])).all()
    assert list(going) == []
    assert receiver.get(EDGE, item.key) is None
    for path in (sender, receiver):
        path.close()


def test_a_message_is_kept_until_it_can_be_told_whether_it_was_got_before(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = small_tiers(root, **DOWN), small_tiers(root)
    for i in range(MANY):
        sender.put(make_message(EDGE, f"m{i}", {"x": pixels(i, PAYLOAD)}))
    item, move = sender.moves()[0]
    going = sender.carry(item, move)
    assert [next(going), next(going)] == [Stage.LEASED, Stage.DOUBLED]

    def fails(*args: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Tickets, "take", fails)
        for _ in range(2):
            with pytest.raises(RendezvousError, match="received before: No space"):
                receiver.get(EDGE, item.key)
    assert receiver.get(EDGE, "none") is None
    arrival = receiver.get(EDGE, item.key)
    assert arrival is not None
    assert (arrival.open()["x"] == int(item.key[1:])).all()
    assert list(going) == []
    assert receiver.get(EDGE, item.key) is None
    assert receiver.health().facts["got"] == 1
    assert sender.health().facts["consumed"] == 1
    for path in (sender, receiver):
        path.close()


def test_a_receiver_that_is_behind_slows_its_sender_wherever_messages_lie(root: str) -> None:
    sender, receiver = small_tiers(root, max_inflight=150), small_tiers(root)
    for i in range(150):
        sender.put(make_message(EDGE, f"m{i}", {"x": pixels(1, PAYLOAD)}))
    placed = sender.health().facts["placed"]
    assert placed["disk no_room"] > 0
    with pytest.raises(ReceiverBehindError, match="edge 0->1 has 150 messages"):
        sender.put(make_message(EDGE, "one more", {"x": pixels(1, PAYLOAD)}))
    assert sender.health().facts["placed"] == placed
    assert sender.health().status is Status.SICK
    for key in ("m3", "m149"):  # of the arena, and of the disk
        assert receiver.get(EDGE, key) is not None
        sender.put(make_message(EDGE, f"after {key}", {"x": pixels(1, PAYLOAD)}))
    for path in (sender, receiver):
        path.close()


def test_without_anything_to_move_there_is_no_thread(root: str) -> None:
    path = small_tiers(root, moves_itself=True)
    for i in range(20):
        path.put(make_message(EDGE, f"m{i}", {"x": pixels(1, PAYLOAD)}))
    assert path._worker is not None
    assert path._worker._thread is None
    path.close()
    assert os.listdir(root) == []

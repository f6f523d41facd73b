"""Messages that move while processes send, receive and die."""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.arena import EDGE, KIB, LONG, Ahead, pixels
from tests.support.processes import Process, Processes
from tests.support.tiers import small_tiers
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.connectors.arena.path import BURY_EVERY
from vllm_omni_sched.connectors.base import Status
from vllm_omni_sched.connectors.disk.path import SWEEP_EVERY
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.tiers import TieredPath
from vllm_omni_sched.connectors.tiers.carry import Stage
from vllm_omni_sched.connectors.tiers.tickets import Tickets
from vllm_omni_sched.errors import NoRoomError, ReceiverBehindError, RendezvousError

TTL = 600.0
PAYLOAD = 6 * KIB
MANY = 20  # messages: the arena is above its high mark, and has room
DOWN = {"high_water": 0.1, "low_water": 0.05}


@pytest.fixture
def start(all_processes: Processes, root: str) -> Callable[..., Process]:
    def started(**options: Any) -> Process:
        process = all_processes.start()
        process.open_tiers(root, **options)
        return process

    return started


def tiers(root: str, clock: Any = monotonic_seconds, **options: Any) -> TieredPath:
    path = small_tiers(root, clock, **options)
    assert isinstance(path, TieredPath)
    return path


def get_all(path: TieredPath, count: int, clock: Ahead) -> dict[int, int]:
    """How often each message is there, if one asks again and again, for longer than anything is given back after."""
    got = dict.fromkeys(range(count), 0)
    for _ in range(4):
        for i in got:
            while (arrival := path.get(EDGE, f"m{i}")) is not None:
                payload = arrival.open()["x"]
                assert (payload.size, payload.min(), payload.max()) == (PAYLOAD, i % 251, i % 251)
                got[i] += 1
        clock.seconds += max(SWEEP_EVERY, BURY_EVERY) + 1
        path.health()
    return got


@pytest.mark.parametrize("first", ["upper", "lower"])
@pytest.mark.parametrize(
    "where",
    [
        "vllm_omni_sched.connectors.arena.index:Index.claim",
        "vllm_omni_sched.connectors.tiers.carry:message_of",
        "vllm_omni_sched.connectors.tiers.tickets:Tickets.write",
        "vllm_omni_sched.connectors.disk.files:write",
        "os:rename",
        "vllm_omni_sched.connectors.disk.outbox:Outbox._enter",
        "vllm_omni_sched.connectors.arena.outbox:Outbox.end_lease",
        "vllm_omni_sched.connectors.tiers.tickets:Tickets.remove",
    ],
)
def test_a_sender_killed_while_it_moves_a_message(
    start: Callable[..., Process], root: str, where: str, first: str
) -> None:
    """Whichever copy is found first, the message is got once. ``upper``: what the dead had is given back before."""
    clock, sender = Ahead(), start(**DOWN)
    receiver = tiers(root, clock)
    assert receiver.get(EDGE, "m0") is None
    sender.put_many(MANY, PAYLOAD)
    sender.die_at(where)
    sender.dies("move", 3)
    if first == "upper":
        clock.seconds = max(SWEEP_EVERY, BURY_EVERY) + 1
        receiver.health()
    assert set(get_all(receiver, MANY, clock).values()) == {1}
    clock.seconds += 3 * TTL
    receiver.health()
    clock.seconds += 3 * TTL
    receiver.health()
    assert [path.name for path in Path(root).rglob("*.m*")] == []
    receiver.close()


@pytest.mark.parametrize(
    "where",
    [
        "vllm_omni_sched.connectors.disk.files:read",
        "vllm_omni_sched.connectors.arena.outbox:Outbox.put",
        "vllm_omni_sched.connectors.arena.index:Index.publish",
        "vllm_omni_sched.connectors.disk.outbox:Outbox.end_lease",
    ],
)
def test_a_sender_killed_while_it_brings_a_message_up(start: Callable[..., Process], root: str, where: str) -> None:
    clock = Ahead()
    sender = start(high_water=0.5, low_water=0.5, expected_wait_seconds=100.0, long_wait_seconds=10.0)
    receiver = tiers(root, clock)
    sender.put_many(60, PAYLOAD)  # the last ones at once go below
    facts = sender.health()[2]
    assert facts["placed"]["disk long_wait"] > 5
    for i in range(20):
        arrival = receiver.get(EDGE, f"m{i}")
        assert arrival is not None
    del arrival
    sender.reap()
    sender.expect("m59", 0.0)
    sender.die_at(where)
    sender.dies("move", 3)
    got = get_all(receiver, 60, clock)
    assert {got[i] for i in range(20, 60)} == {1}
    assert receiver.health().facts["repeated"] <= 1
    receiver.close()


def test_a_receiver_killed_with_a_copy_of_a_move_that_was_left_gives_it_back(
    start: Callable[..., Process], root: str
) -> None:
    """It had taken the ticket; the other copy counts then."""
    clock, sender, dying = Ahead(), start(**DOWN), start()
    sender.put_many(MANY, PAYLOAD)
    sender.die_at("vllm_omni_sched.connectors.arena.outbox:Outbox.end_lease")
    sender.dies("move", 3)
    (ticket,) = Path(root).rglob("*.move")
    (moved,) = Path(root).rglob("*.msg")
    moved.unlink()  # so that only the copy in the arena is there
    receiver = tiers(root, clock)
    assert receiver.get(EDGE, "none") is None
    clock.seconds = BURY_EVERY + 1
    receiver.health()
    held = [i for i in range(MANY) if dying.get(f"m{i}", True) is not None]
    assert len(held) == MANY
    assert ticket.with_suffix(".moved").is_symlink()
    dying.kill()
    assert set(get_all(receiver, MANY, clock).values()) == {1}
    receiver.close()


def test_two_thousand_messages_and_an_arena_that_holds_a_hundred(root: str) -> None:
    """All of them wait at once; the sender never does."""
    sender, receiver = tiers(root, moves_itself=True, **DOWN), tiers(root)
    most = 0
    for i in range(2000):
        sender.put(make_message(EDGE, f"m{i}", {"x": pixels(i % 251, PAYLOAD)}))
        most = max(most, sender.books.used[0, "image"])
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
    assert sender._worker.is_running
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
    assert not sender._worker.is_running


def test_receivers_that_ask_while_messages_move(start: Callable[..., Process], root: str) -> None:
    """Three receivers in two processes ask for everything; each message is got by one of them."""
    sender, count = tiers(root, moves_itself=True, expected_wait_seconds=0.05, soon_seconds=10.0, **DOWN), 300
    processes = [start(), start()]
    for process in processes:
        process.begin("receive_all", count, processes.index(process))
    receiver, found = tiers(root), []
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
    sender, receiver = tiers(root, **DOWN), tiers(root)
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
    sender, receiver = tiers(root, **DOWN), tiers(root)
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
            with pytest.raises(RendezvousError, match="got before: No space"):
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
    sender, receiver = tiers(root, max_inflight=150), tiers(root)
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
    path = tiers(root, moves_itself=True)
    for i in range(20):
        path.put(make_message(EDGE, f"m{i}", {"x": pixels(1, PAYLOAD)}))
    assert path._worker is not None
    assert path._worker._thread is None
    path.close()
    assert os.listdir(root) == []


def test_a_forked_child_is_told_that_tiers_are_not_its_own(start: Callable[..., Process]) -> None:
    process = start(moves_itself=True, **DOWN)
    process.put_many(90, PAYLOAD)
    said = process.fork_and_use()
    assert [line.split(":")[0] for line in said] == ["PathClosedError", "PathClosedError", "0", "closed"]
    assert process.get("m1") == (PAYLOAD, 1)
    process.close()

"""Messages that go to the disk because an arena is full: what becomes of them, whoever asks, dies or is behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.arena import EDGE, KIB, LONG, Ahead, FakeClock, pixels
from tests.support.processes import Process, Processes
from tests.support.tiers import PAYLOAD, small_tiers
from vllm_omni_sched.clock import monotonic_seconds, sleep_seconds
from vllm_omni_sched.config.errors import ConfigError, NoRoomError, ReceiverBehindError
from vllm_omni_sched.connectors.arena.transport import BURY_EVERY
from vllm_omni_sched.connectors.auto import AutoOptions, auto_transport
from vllm_omni_sched.connectors.disk.transport import SWEEP_EVERY
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.extra import read_extra
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.tiers import TieredTransport, TiersOptions
from vllm_omni_sched.connectors.transport import Status, Traffic, Transport
from vllm_omni_sched.connectors.watch import Alarm, Watch, WatchOptions

OTHER = Edge("1", "2")
PUT_AT = 1000.0


@pytest.fixture
def start(all_processes: Processes, root: str) -> Callable[..., Process]:
    def started(**options: Any) -> Process:
        process = all_processes.start()
        process.open_tiers(root, **options)
        return process

    return started


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(PUT_AT)


@pytest.fixture
def sender(root: str, clock: FakeClock) -> Iterator[TieredTransport]:
    path = small_tiers(root, clock, ttl_seconds=600.0)
    yield path
    path.close()


@pytest.fixture
def receiver(root: str, clock: FakeClock) -> Iterator[TieredTransport]:
    path = small_tiers(root, clock, ttl_seconds=600.0)
    yield path
    path.close()


def put(path: Transport, key: str, value: int = 1, edge: Edge = EDGE) -> None:
    path.put(make_message(edge, key, {"x": pixels(value, PAYLOAD)}))


def fill_up(path: Transport) -> None:
    """Fill the arena, so that ten messages go to the disk."""
    for i in range(110):
        put(path, f"m{i}")
    assert path.health().facts["tier_messages"] == {"arena": 100, "disk": 10}


def test_two_thousand_messages_and_an_arena_that_holds_a_hundred(
    sender: TieredTransport, receiver: TieredTransport
) -> None:
    """All of them wait at once; the sender never does."""
    for i in range(2000):
        put(sender, f"m{i}", i % 251)
    facts = sender.health().facts
    assert facts["tier_messages"] == {"arena": 100, "disk": 1900}
    assert facts["tier_bytes"]["disk"] > 1900 * PAYLOAD
    for i in random.Random(0).sample(range(2000), 2000):
        arrival = receiver.get(EDGE, f"m{i}")
        assert arrival is not None, i
        assert (arrival.open()["x"] == i % 251).all()
        del arrival
    sender.reap()
    facts = sender.health().facts
    assert (facts["in_flight"], facts["refused"]) == (0, 0)
    assert receiver.health().facts["got"] == 2000


def test_a_message_that_is_put_again_is_one_wherever_it_lies(
    sender: TieredTransport, receiver: TieredTransport
) -> None:
    fill_up(sender)
    put(sender, "m0", 2)  # from the arena to the disk
    assert receiver.get(EDGE, "m1") is not None
    sender.reap()
    put(sender, "m105", 3)  # and back
    for key, value in (("m0", 2), ("m105", 3)):
        arrival = receiver.get(EDGE, key)
        assert arrival is not None
        assert (arrival.open()["x"] == value).all()
        assert receiver.get(EDGE, key) is None
    assert sender.discard("m2") == sender.discard("m109") == 1
    assert receiver.get(EDGE, "m2") is receiver.get(EDGE, "m109") is None


def test_what_nobody_gets_expires_in_each_tier(sender: TieredTransport, clock: FakeClock, root: str) -> None:
    fill_up(sender)
    clock.now += 601
    sender.reap()
    facts = sender.health().facts
    assert (facts["arena"]["expired"], facts["disk"]["expired"], facts["in_flight"]) == (100, 10, 0)
    assert list(Path(root).rglob("*.msg")) == []


def test_receivers_that_ask_while_messages_come(start: Callable[..., Process], root: str) -> None:
    """Three receivers in two processes ask for everything; each message is got by one of them."""
    sender, count = small_tiers(root), 300
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
        put(sender, f"end {i}", 0)
    got = [process.result() for process in processes]
    until = monotonic_seconds() + LONG
    while len(found) + sum(map(len, got)) < count and monotonic_seconds() < until:
        sleep_seconds(0.001)
    ended.set()
    thread.join()
    assert sorted([*found, *got[0], *got[1]]) == list(range(count))
    for path in (sender, receiver):
        path.close()


@pytest.mark.parametrize(
    "where", ["vllm_omni_sched.connectors.disk.files:write", "vllm_omni_sched.connectors.disk.transport:Outbox._enter"]
)
def test_what_a_killed_sender_has_put_can_be_got_and_goes(start: Callable[..., Process], root: str, where: str) -> None:
    clock, dying = Ahead(), start()
    receiver = small_tiers(root, clock)
    assert receiver.get(EDGE, "m0") is None
    dying.put_many(110, PAYLOAD)
    dying.die_at(where)
    dying.dies("put", "last", PAYLOAD, 1)
    for i in range(100):
        assert receiver.get(EDGE, f"m{i}") is not None
    assert receiver.get(EDGE, "m105") is not None
    clock.seconds = 3 * 600.0 + max(SWEEP_EVERY, BURY_EVERY)
    receiver.health()
    assert [path.name for path in Path(root).rglob("*") if path.suffix in (".msg", ".new", ".got", ".out")] == []
    receiver.close()


def test_a_forked_child_is_told_that_tiers_are_not_its_own(start: Callable[..., Process]) -> None:
    process = start()
    process.put_many(110, PAYLOAD)
    said = process.fork_and_use()
    assert [line.split(":")[0] for line in said] == ["TransportClosedError", "TransportClosedError", "0", "closed"]
    assert [process.get("m1"), process.get("m109")] == [(PAYLOAD, 1), (PAYLOAD, 109)]
    process.close()


def test_a_disk_that_is_full_too_refuses_until_there_is_room(all_processes: Processes, root: str) -> None:
    process = all_processes.start()
    try:
        process.own_mount(root, 4 * 1024 * KIB)
    except OSError as error:
        pytest.skip(str(error))
    process.open_tiers(root)
    process.fill(f"{root}/fill", process.free_bytes(root) - 900 * KIB)  # the arena and a few files
    with pytest.raises(NoRoomError, match=r"in any tier: arena: .*; disk: .*"):
        process.put_many(400, PAYLOAD)
    status, _, facts = process.health()
    assert (status, facts["refused"]) == ("sick", 1)
    there = facts["in_flight"]
    assert there > 40
    for i in range(there):
        assert process.get(f"m{i}") == (PAYLOAD, i % 251)
    process.remove(f"{root}/fill")
    assert process.put("again", PAYLOAD, 1) > 0
    process.close()


def test_a_receiver_that_is_behind_slows_its_sender_wherever_messages_lie(root: str) -> None:
    sender, receiver = small_tiers(root, max_inflight=150), small_tiers(root)
    for i in range(150):
        put(sender, f"m{i}")
    before = sender.health().facts["tier_messages"]
    assert before["disk"] > 0
    with pytest.raises(ReceiverBehindError, match="edge 0->1 has 150 messages"):
        put(sender, "one more")
    assert sender.health().facts["tier_messages"] == before
    assert sender.health().status is Status.SICK
    for key in ("m3", "m149"):  # of the arena, and of the disk
        assert receiver.get(EDGE, key) is not None
        put(sender, f"after {key}")
    for path in (sender, receiver):
        path.close()


def traffic(path: Transport) -> dict[Edge, Traffic]:
    found = path.traffic()
    assert {name for name, _ in found} <= {"tiers"}
    return {edge: one for (_, edge), one in found.items()}


def test_what_waits_in_any_tier_is_told(sender: TieredTransport, receiver: TieredTransport, clock: FakeClock) -> None:
    assert traffic(sender) == {}
    fill_up(sender)
    put(sender, "other", edge=OTHER)
    clock.now += 5
    held = receiver.get(EDGE, "m1")
    assert receiver.get(EDGE, "m109") is not None  # of the disk: a copy
    found = traffic(sender)
    assert len(found[EDGE].waiting) == 108
    assert {one.since for one in found[EDGE].waiting} == {PUT_AT}
    assert [one.since for one in found[EDGE].held] == [PUT_AT + 5]
    assert (found[EDGE].got_at, found[EDGE].got_put_at) == (PUT_AT + 5, PUT_AT)
    assert (len(found[OTHER].waiting), found[OTHER].got_at) == (1, None)
    del held
    assert traffic(sender)[EDGE].held == []


def test_stalls_and_leaks_are_found(sender: TieredTransport, receiver: TieredTransport, clock: FakeClock) -> None:
    watch = Watch(WatchOptions(stall_seconds=10, leak_seconds=100))

    def look() -> set[Alarm]:
        watch.look(sender.traffic(), clock.now)
        return {alarm for alarm, _, _ in watch.current}

    fill_up(sender)
    assert receiver.get(EDGE, "m0") is not None
    assert look() == set()
    clock.now += 1
    put(sender, "later")
    clock.now += 10
    assert look() == {Alarm.STALL}
    assert receiver.get(EDGE, "m109") is not None
    assert look() == set()


def test_who_has_carried_a_message_is_told_to_its_thread(sender: TieredTransport, receiver: TieredTransport) -> None:
    assert sender.carrier() == "tiers"
    put(sender, "first")
    assert sender.carrier() == "arena"
    for i in range(110):
        put(sender, f"m{i}")
    assert sender.carrier() == "disk"
    said = []
    thread = threading.Thread(target=lambda: said.append((receiver.get(EDGE, "first"), receiver.carrier())))
    thread.start()
    thread.join()
    assert said[0][1] == "arena"
    assert receiver.carrier() == "tiers"


@pytest.mark.parametrize("options", [{"disk": None}, {"hihg": 1}, {"disk": {"max_bytes": 1}}])
def test_options_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TiersOptions.model_validate(options)


def test_tiers_that_cannot_be(root: str) -> None:
    path = small_tiers(root)
    for tiers in (path.tiers[:1], [path.tiers[0]] * 2):
        with pytest.raises(ConfigError, match="at least two transports, with different names"):
            TieredTransport(tiers)
    path.close()
    for refused, says in (
        ({"arena": None, "mooncake": {}, "tiers": {}}, "'arena' is null"),
        ({"mooncake": {}, "tiers": {"mooncake": {}}}, "unset one of both"),
        ({"arena": None}, "no other transport is named"),
        ({"edges": {"0->1": ["mooncake"]}}, r"'edges.0->1' names \['mooncake'\]; there are \['arena'\]"),
        ({"foreign": {"arena": {"name": "X"}}}, "'foreign.arena' has the name of another transport"),
    ):
        with pytest.raises(ConfigError, match=says):
            read_extra(AutoOptions, refused)


def test_tiers_are_asked_for_by_options(root: str, tmp_path: Path) -> None:
    options = {"arena": {"directory": root, "arena": "a"}, "tiers": {"disk": {"directory": str(tmp_path)}}}
    path = auto_transport(AutoOptions.model_validate(options | {"edges": {"0->1": ["arena"]}}))
    put(path, "k")
    assert path.carrier() == "arena"
    facts = path.health().facts["tiers"]
    assert facts["tier_messages"] == {"arena": 1, "disk": 0}
    assert facts["disk"]["directory"].endswith("/a")  # under the name of the arena
    path.close()

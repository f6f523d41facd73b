"""What tiers tell about their traffic, so that stalls and leaks are found, and who has carried a message."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.support.arena import EDGE, KIB, FakeClock, pixels
from tests.support.tiers import small_tiers
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.transport import Traffic, Transport
from vllm_omni_sched.connectors.watch import Alarm, Watch, WatchOptions

OTHER = Edge("1", "2")
PUT_AT = 1000.0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(PUT_AT)


@pytest.fixture
def sender(root: str, clock: FakeClock) -> Iterator[Transport]:
    path = small_tiers(root, clock)
    yield path
    path.close()


@pytest.fixture
def receiver(root: str, clock: FakeClock) -> Iterator[Transport]:
    path = small_tiers(root, clock)
    yield path
    path.close()


def put(path: Transport, key: str, edge: Edge = EDGE) -> None:
    path.put(make_message(edge, key, {"x": pixels(1, 6 * KIB)}))


def fill_up(path: Transport) -> None:
    """Fill the arena, so that ten messages go to the disk."""
    for i in range(110):
        put(path, f"m{i}")
    assert path.health().facts["tier_messages"] == {"arena": 100, "disk": 10}


def traffic(path: Transport) -> dict[Edge, Traffic]:
    path.health()  # looks at all
    found = path.traffic()
    assert {name for name, _ in found} <= {"tiers"}
    return {edge: one for (_, edge), one in found.items()}


def test_what_waits_in_any_tier_is_told(sender: Transport, receiver: Transport, clock: FakeClock) -> None:
    assert traffic(sender) == {}
    fill_up(sender)
    put(sender, "other", OTHER)
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


def test_stalls_and_leaks_are_found(sender: Transport, receiver: Transport, clock: FakeClock) -> None:
    watch = Watch(WatchOptions(stall_seconds=10, leak_seconds=100))

    def look() -> set[Alarm]:
        sender.health()
        watch.look(sender.traffic(), clock.now)
        return {alarm for alarm, _, _ in watch.current}

    fill_up(sender)
    held = receiver.get(EDGE, "m0")
    assert look() == set()
    clock.now += 1
    put(sender, "later")
    clock.now += 10
    assert look() == {Alarm.STALL}
    assert receiver.get(EDGE, "m109") is not None
    assert look() == set()
    clock.now += 90
    assert look() == {Alarm.HELD}
    clock.now += 100
    assert look() == {Alarm.HELD, Alarm.UNCLAIMED}
    del held
    assert look() == {Alarm.UNCLAIMED}


def test_who_has_carried_a_message_is_told_to_its_thread(sender: Transport, receiver: Transport) -> None:
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
    assert receiver.get(EDGE, "m109") is not None
    assert receiver.carrier() == "disk"

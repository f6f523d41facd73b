"""A receiver that is stopped, one that keeps views for ever, and nobody at all: the sender's watch tells."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.support.arena import EDGE, KIB, MIB, FakeClock, pixels, small
from tests.support.processes import Process
from tests.support.stopping import stop
from vllm_omni_sched.connectors.arena import ArenaOptions, ArenaTransport
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.watch import Alarm, Watch, WatchOptions

Start = Callable[..., Process]


class Sender:
    """A path whose time is ours, and its watch."""

    def __init__(self, options: ArenaOptions) -> None:
        self.clock = FakeClock()
        self.path = ArenaTransport(options, clock=self.clock)
        self.watch = Watch(WatchOptions(stall_seconds=10, leak_seconds=100))

    def put(self, key: str, nbytes: int = 10) -> None:
        self.path.put(make_message(EDGE, key, {"x": pixels(1, nbytes)}))

    def after(self, seconds: float) -> list[tuple[Alarm, int]]:
        """What is found, and was not before."""
        self.clock.now += seconds
        return [(one.alarm, one.messages) for one in self.watch.look(self.path.traffic(), self.clock.now)]


@pytest.fixture
def sender(options: ArenaOptions) -> Iterator[Sender]:
    sender = Sender(options)
    yield sender
    sender.path.close()


def test_a_receiver_that_was_stopped_is_a_stall_until_it_goes_on(sender: Sender, start: Start) -> None:
    receiver = start()
    for number in range(3):
        sender.put(f"before {number}")
        assert receiver.get(f"before {number}") == (10, 1)
    assert sender.after(1) == []
    stop(receiver.pid)
    try:
        found = []
        for number in range(12):
            sender.put(f"m{number}")
            found += sender.after(1)
        assert [alarm for alarm, _ in found] == [Alarm.STALL], "once"
    finally:
        os.kill(receiver.pid, signal.SIGCONT)
    assert [receiver.get(f"m{number}") for number in range(12)] == [(10, 1)] * 12
    assert sender.after(1) == []
    assert sender.watch.current == {}


def test_an_edge_that_is_idle_is_none(sender: Sender, start: Start) -> None:
    receiver = start()
    sender.put("one")
    assert receiver.get("one") == (10, 1)
    assert [found for _ in range(50) for found in sender.after(10)] == []


def test_a_receiver_that_keeps_views_for_ever_is_told_once(sender: Sender, start: Start) -> None:
    receiver = start()
    for number in range(5):
        sender.put(f"kept {number}", 8 * KIB)
        assert receiver.get(f"kept {number}", hold=True) == (8 * KIB, 1)
    assert sender.after(1) == []
    assert [found for _ in range(20) for found in sender.after(10.5)] == [(Alarm.HELD, 5)]
    ((finding),) = sender.watch.current.values()
    assert finding.nbytes >= 5 * 8 * KIB
    for number in range(5):
        receiver.drop(f"kept {number}")
    assert sender.after(1) == []
    assert sender.watch.current == {}


def test_ten_thousand_messages_that_nobody_gets_are_told_twice_and_not_by_the_message(root: str) -> None:
    sender = Sender(small(root, ring_bytes=4 * MIB, max_messages=16384))
    found = []
    for number in range(10_000):
        sender.put(f"{number}")
        found += sender.after(0.001) if number % 1000 == 0 else []
    found += [one for _ in range(30) for one in sender.after(5.1)]
    assert found == [(Alarm.STALL, 10_000), (Alarm.UNCLAIMED, 10_000)]
    sender.path.close()


def test_what_an_aborted_request_has_left_behind(sender: Sender, start: Start) -> None:
    receiver = start()
    sender.put("of an aborted request")
    for number in range(15):
        sender.put(f"m{number}")
        assert receiver.get(f"m{number}") == (10, 1)
        expected = [(Alarm.UNCLAIMED, 1)] if number == 10 else []
        assert sender.after(9.5) == expected

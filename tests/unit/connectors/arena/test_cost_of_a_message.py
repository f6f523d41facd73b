"""How many Python calls and kernel locks a small message costs, whatever the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.support.arena import EDGE, place, small
from vllm_omni_sched.connectors.arena import ArenaTransport, inbox
from vllm_omni_sched.connectors.arena.memory import ByteLocks, Memory
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.latency_histogram import LatencyHistogram

PUT, GET, MISS = 32, 19, 5
"""Most calls of Python functions; one of `put` wakes the receiver. A change that needs more says what they are for."""


def calls_in(act: Callable[[], Any]) -> int:
    """Return how many Python functions of this package are called."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and "vllm_omni_sched" in frame.f_code.co_filename

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ArenaTransport, ArenaTransport]]:
    # searches that are due by the clock, for new senders and in an index without news, are not part of a message's cost
    monkeypatch.setattr(inbox, "NEW_SENDERS_AFTER", 60.0)
    monkeypatch.setattr(inbox, "LOOK_AGAIN", 60.0)
    with place() as root:
        sender, receiver = ArenaTransport(small(root)), ArenaTransport(small(root))
        sender.put(make_message(EDGE, "first", [0]))
        assert receiver.get(EDGE, "first") is not None
        yield sender, receiver
        sender.close()
        receiver.close()


def test_calls_do_not_grow(ends: tuple[ArenaTransport, ArenaTransport]) -> None:
    sender, receiver = ends
    for number in range(20):
        key = f"key {number}"
        message = make_message(EDGE, key, [number])
        assert receiver.get(EDGE, key) is None
        assert calls_in(partial(receiver.get, EDGE, key)) <= MISS
        assert calls_in(partial(sender.put, message)) <= PUT
        assert calls_in(partial(receiver.get, EDGE, key)) <= GET
    assert receiver.health().facts["got"] == 21


def test_a_message_takes_one_kernel_lock(
    ends: tuple[ArenaTransport, ArenaTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ends
    acquired, acquire = [], ByteLocks.acquire

    def counted(self: ByteLocks, at: int) -> bool:
        acquired.append(at)
        return acquire(self, at)

    monkeypatch.setattr(ByteLocks, "acquire", counted)
    for number in range(20):
        key = f"key {number}"
        assert receiver.get(EDGE, key) is None
        sender.put(make_message(EDGE, key, [number]))
        assert len(acquired) == number
        assert receiver.get(EDGE, key) is not None
        assert len(acquired) == number + 1


def test_both_sides_map_the_whole_index_before_the_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    touched, touch = [], Memory.touch

    def counted(self: Memory, start: int, nbytes: int) -> None:
        touched.append((start, nbytes))
        touch(self, start, nbytes)

    monkeypatch.setattr(Memory, "touch", counted)
    with place() as root:
        sender, receiver = ArenaTransport(small(root)), ArenaTransport(small(root))
        sender.put(make_message(EDGE, "k", [0]))
        assert receiver.get(EDGE, "k") is not None
        assert touched == 2 * [(0, sender._sender().layout.ring)]
        sender.close()
        receiver.close()


def test_a_sender_that_was_removed_is_not_asked_for_news(ends: tuple[ArenaTransport, ArenaTransport]) -> None:
    sender, receiver = ends
    sender.close()
    side = receiver._inbox
    assert side is not None
    assert len(side._words) == 1
    side.bury()
    assert len(side._words) == len(side._senders) == 0
    assert receiver.get(EDGE, "later") is None


def test_an_observed_duration_is_one_call() -> None:
    times, many = LatencyHistogram(), 5_000
    assert sum(calls_in(partial(times.observe, 1e-4)) for _ in range(many)) == many
    assert times.count == many

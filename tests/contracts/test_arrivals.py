"""Check the promises of `Arrivals` on every transport that tells which messages are there.

A transport of another kind is one more entry of `tests.support.transport_kinds.WAKING`.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from tests.support.arena import LONG
from tests.support.transport_kinds import WAKING, Kind, Open, arena, files
from vllm_omni_sched.connectors import receive_queue
from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.framing import make_message
from vllm_omni_sched.connectors.receive_queue import Missed, ReceiveCondition, ReceiveQueue
from vllm_omni_sched.connectors.transport import Arrivals, Transport

AB, BC = Edge("a", "b"), Edge("b", "c")


@pytest.fixture(params=WAKING, ids=lambda kind: kind.__name__)
def open_end(request: pytest.FixtureRequest) -> Iterator[Open]:
    kind: Kind = request.param
    with kind() as open_end:
        yield open_end


@pytest.fixture
def arrivals(receiver: Transport) -> Arrivals:
    found = receiver.arrivals(AB)
    assert found is not None
    return found


def put(sender: Transport, key: str, edge: Edge = AB) -> None:
    sender.put(make_message(edge, key, {"key": key}))


def sleeper(arrivals: Arrivals, ticket: Hashable) -> threading.Thread:
    """Return a thread that sleeps far longer than this test takes, unless it is woken."""
    thread = threading.Thread(target=arrivals.wait, args=(ticket, 10 * LONG), daemon=True)
    thread.start()
    return thread


def test_what_is_there_may_be_there_until_it_was_got(
    sender: Transport, receiver: Transport, arrivals: Arrivals
) -> None:
    assert arrivals.may_be_there(["x", "y"]) == [False, False]
    put(sender, "y")
    assert arrivals.may_be_there(["x", "y"]) == [False, True]
    assert receiver.get(AB, "y") is not None
    assert arrivals.may_be_there(["x", "y"]) == [False, False]


def test_a_look_needs_only_what_came_since_the_last_one(
    sender: Transport, receiver: Transport, arrivals: Arrivals
) -> None:
    put(sender, "before")  # its sender is known from here on
    assert receiver.get(AB, "before") is not None
    names = [f"message {number}" for number in range(300)]  # more than there are counters
    assert arrivals.may_be_there(names) == [False] * len(names)
    for name in names:
        ticket = arrivals.ticket()
        put(sender, name)
        assert ticket != arrivals.ticket()
        assert arrivals.may_be_there(names, ticket)[names.index(name)]


def test_the_first_message_of_a_new_sender_is_seen(open_end: Open, arrivals: Arrivals) -> None:
    ticket = arrivals.ticket()
    put(open_end(), "k")
    while arrivals.ticket() == ticket:  # senders are searched for after a tenth of a millisecond
        pass
    assert arrivals.may_be_there(["k"], ticket) == [True]


def test_a_message_wakes_who_sleeps(sender: Transport, arrivals: Arrivals) -> None:
    thread = sleeper(arrivals, arrivals.ticket())
    put(sender, "k")
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_message_that_came_since_the_ticket_lets_nobody_sleep(sender: Transport, arrivals: Arrivals) -> None:
    ticket = arrivals.ticket()
    put(sender, "k")
    thread = sleeper(arrivals, ticket)
    thread.join(LONG)
    assert not thread.is_alive()


def test_several_sleep_and_all_are_woken(sender: Transport, open_end: Open) -> None:
    waiting = [found for found in (open_end().arrivals(AB) for _ in range(3)) if found is not None]
    threads = [sleeper(one, one.ticket()) for one in waiting]
    assert len(threads) == 3
    put(sender, "k")
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()


def test_whoever_sleeps_can_be_woken_without_a_message(arrivals: Arrivals) -> None:
    thread = sleeper(arrivals, arrivals.ticket())
    arrivals.wake()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_closed_end_sends_receivers_to_get_which_tells_why(receiver: Transport, arrivals: Arrivals) -> None:
    receiver.close()
    assert arrivals.may_be_there(["x", "y"]) == [True, True]
    arrivals.wait(arrivals.ticket(), 1e-3)
    arrivals.wake()


def test_a_thread_asks_at_most_twice_for_each_of_64_messages(
    sender: Transport, receiver: Transport, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once to learn that it is not there, and once when it is, in whichever order they come."""
    monkeypatch.setattr(receive_queue, "POLL_AGAIN", 10 * LONG)
    wanted, got, asked = [f"m{number}" for number in range(64)], set[str](), list[str]()
    missed: list[Missed | None] = [None]
    queue = ReceiveQueue(wanted, lambda: missed[0])
    condition: Any = ReceiveCondition(threading.Condition(), queue)

    def receive() -> None:
        while queue:
            for _ in range(len(queue)):
                asked.append(key := queue.popleft())
                if receiver.get(AB, key) is not None:
                    got.add(key)
                    continue
                missed[0] = Missed(arrivals, key)
                queue.append(key)
            with condition:
                condition.wait(1e-3)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    for key in reversed(wanted):
        put(sender, key)
        put(sender, f"another {key}", BC)
    thread.join(LONG)
    assert got == set(wanted)
    assert len(asked) <= 2 * len(wanted)


@pytest.mark.parametrize("kind", [lambda: arena(wake_receivers=False), files], ids=["switched off", "files"])
def test_others_leave_receivers_to_poll(kind: Kind) -> None:
    with kind() as open_end:
        sender, receiver = open_end(), open_end()
        assert receiver.arrivals(AB) is None
        put(sender, "k")
        while receiver.get(AB, "k") is None:
            pass

"""The rules of `ReceiveQueue`, one by one, and the sleep of its thread."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.arena import LONG, FakeClock
from vllm_omni_sched.connectors.receive_queue import (
    POLL_AGAIN,
    POLLED_AGAIN,
    SLEEP,
    Missed,
    ReceiveCondition,
    ReceiveQueue,
)
from vllm_omni_sched.connectors.transport import Arrivals


class Board(Arrivals):
    """Messages that are there, as a test says; counts what it is asked."""

    def __init__(self) -> None:
        self.there: set[str] = set()
        self.shown = self.looks = self.woken = 0
        self.waits: list[float] = []

    def show(self, *keys: str) -> None:
        self.there.update(keys)
        self.shown += 1

    def ticket(self) -> Hashable:
        return self.shown

    def may_be_there(self, keys: Sequence[str], since: Hashable = None) -> list[bool]:
        self.looks += 1
        return [key in self.there for key in keys]

    def wait(self, ticket: Hashable, seconds: float) -> None:
        if ticket == self.shown:
            self.waits.append(seconds)

    def wake(self) -> None:
        self.woken += 1


class Loop:
    """The loop that takes entries from a queue, without its thread; entries are the keys of their messages."""

    def __init__(self, *keys: str, told: bool = True) -> None:
        self.clock, self.board, self.told = FakeClock(), Board(), told
        self.asked: list[str] = []
        self.pauses: list[float] = []
        self.queue: ReceiveQueue[str] = ReceiveQueue(keys, self._missed, self.clock)

    def _missed(self) -> Missed | None:
        return Missed(self.board, self.asked[-1]) if self.told else None

    def turn(self) -> list[str]:
        """Return what was polled in one pass; what is there is taken."""
        before = len(self.asked)
        for _ in range(len(self.queue)):
            self.asked.append(self.queue.popleft())
            if self.asked[-1] in self.board.there:
                self.board.there.remove(self.asked[-1])
            else:
                self.queue.append(self.asked[-1])
        return self.asked[before:]

    def sleep(self) -> None:
        self.queue.sleep(1e-3, self.pauses.append, lambda arrivals: None)


def test_rule_1_a_new_entry_is_polled_in_the_next_pass() -> None:
    loop = Loop("a", "b")
    assert loop.turn() == ["a", "b"]
    assert loop.turn() == []
    loop.queue.append("c")
    assert loop.turn() == ["c"]


def test_rule_2_an_entry_is_polled_again_when_its_message_may_be_there() -> None:
    loop = Loop("a", "b", "c")
    loop.turn()
    loop.board.show("b")
    assert loop.turn() == ["b"]
    assert loop.turn() == []
    assert list(iter(loop.queue)) == ["a", "c"]


def test_a_message_that_was_said_to_be_there_and_was_not_is_polled_again_after_a_pause() -> None:
    """As when another process has its slot locked."""
    loop = Loop("a")
    loop.turn()
    loop.board.show("a")
    assert len(loop.queue) == 1
    loop.asked.append(loop.queue.popleft())
    loop.queue.append("a")
    loop.sleep()
    assert (loop.pauses, loop.board.waits) == ([1e-3], [])
    assert loop.turn() == ["a"]


def test_rule_3_an_entry_of_which_nothing_is_known_is_polled_in_each_pass() -> None:
    loop = Loop("a", told=False)
    for _ in range(3):
        assert loop.turn() == ["a"]
        loop.sleep()
    assert (loop.pauses, loop.board.waits) == ([1e-3] * 3, [])


def test_rule_4_every_entry_is_polled_after_a_while() -> None:
    loop = Loop("a")
    loop.turn()
    loop.clock.now += POLL_AGAIN * 0.6
    loop.queue.append("b")
    assert loop.turn() == ["b"]
    loop.clock.now += POLL_AGAIN * 0.6
    assert loop.turn() == ["a"]
    loop.clock.now += POLL_AGAIN * 0.6
    assert loop.turn() == ["b"]


def test_rule_4_only_a_few_are_polled_again_in_a_pass_those_polled_first_first() -> None:
    keys = [f"k{number}" for number in range(3 * POLLED_AGAIN)]
    loop = Loop(*keys)
    loop.turn()
    loop.clock.now += 2 * POLL_AGAIN
    assert [loop.turn() for _ in range(3)] == [
        keys[:POLLED_AGAIN],
        keys[POLLED_AGAIN:-POLLED_AGAIN],
        keys[-POLLED_AGAIN:],
    ]
    assert loop.turn() == []


def test_rule_5_what_may_be_there_comes_first() -> None:
    loop = Loop("a", "b")
    loop.turn()
    loop.clock.now += 2 * POLL_AGAIN
    loop.queue.append("c")
    loop.board.show("b")
    assert loop.turn() == ["b", "c", "a"]


def test_nothing_is_looked_at_while_nothing_is_shown() -> None:
    loop = Loop("a", "b")
    loop.turn()
    loop.turn()
    before = loop.board.looks
    assert [loop.turn() for _ in range(100)] == [[]] * 100
    assert loop.board.looks == before


def test_a_queue_is_true_while_it_has_entries() -> None:
    loop = Loop("a")
    loop.turn()
    assert len(loop.queue) == 0
    assert loop.queue
    loop.board.show("a")
    loop.turn()
    assert not loop.queue


def test_its_thread_sleeps_only_after_a_look_in_vain() -> None:
    loop = Loop("a")
    loop.turn()
    loop.sleep()
    assert loop.board.waits == [], "nobody has looked since the poll"
    loop.turn()
    loop.sleep()
    assert loop.board.waits == [SLEEP]
    loop.queue.append("b")
    loop.sleep()
    assert loop.board.waits == [SLEEP], "there is a new entry"
    loop.turn()
    loop.turn()
    loop.board.show("b")
    loop.sleep()
    assert loop.board.waits == [SLEEP], "a message has come since the look"
    assert loop.pauses == []


def test_entries_of_several_who_tell_are_polled_by_the_loops_own_pause() -> None:
    loop = Loop("a")
    loop.turn()
    one, loop.board = loop.board, Board()
    loop.queue.append("b")
    loop.turn()
    loop.turn()
    loop.sleep()
    assert (loop.pauses, one.waits, loop.board.waits) == ([1e-3], [], [])
    one.show("a")
    assert "a" in [loop.queue.popleft() for _ in range(len(loop.queue))]


def test_an_entry_that_somebody_else_takes_out_is_forgotten() -> None:
    loop = Loop("a", "b")
    loop.turn()
    loop.queue.remove("a")
    loop.board.show("a", "b")
    assert loop.turn() == ["b"]
    assert not loop.queue


@given(st.lists(st.tuples(st.sampled_from(["add", "show", "turn", "wait", "cancel"]), st.integers(0, 7))))
def test_no_message_is_left_and_no_entry_is_polled_without_reason(steps: list[tuple[str, int]]) -> None:
    """After any history, a pass polls exactly the new entries, those whose message is there, and those that are due."""
    loop, polled = Loop(), dict[str, float]()
    for step, number in steps:
        key = f"k{number}"
        if step == "add" and key not in list(iter(loop.queue)):
            loop.queue.append(key)
            polled.pop(key, None)
        elif step == "show":
            loop.board.show(key)
        elif step == "cancel" and key in list(iter(loop.queue)):
            loop.queue.remove(key)
        elif step == "wait":
            loop.clock.now += number * POLL_AGAIN / 5
        elif step == "turn":
            now, waiting, there = loop.clock.now, list(iter(loop.queue)), set(loop.board.there)
            wanted = {one for one in waiting if one not in polled or one in there}
            due = {one for one in waiting if one not in wanted and now - polled[one] >= POLL_AGAIN}
            found = set(loop.turn())
            assert found >= wanted
            assert found - wanted <= due
            assert len(found - wanted) == min(len(due), POLLED_AGAIN)
            polled |= dict.fromkeys(found, now)
    loop.turn()
    assert not loop.board.there & set(iter(loop.queue))


def test_a_notification_wakes_the_thread_that_sleeps_on_messages() -> None:
    entered, woken = threading.Event(), threading.Event()

    class Sleeping(Board):
        def wait(self, ticket: Hashable, seconds: float) -> None:
            entered.set()
            assert woken.wait(LONG)

        def wake(self) -> None:
            super().wake()
            woken.set()

    loop = Loop("a")
    loop.board = Sleeping()
    loop.turn()
    loop.turn()
    condition: Any = ReceiveCondition(threading.Condition(), loop.queue)

    def sleep() -> None:
        with condition:
            condition.wait(1e-3)

    thread = threading.Thread(target=sleep)
    thread.start()
    assert entered.wait(LONG)
    with condition:  # it sleeps without the lock
        condition.notify()
        condition.notify_all()
    thread.join(LONG)
    assert not thread.is_alive()
    assert loop.board.woken == 1


def test_an_empty_queue_waits_for_a_notification() -> None:
    loop = Loop()
    condition: Any = ReceiveCondition(threading.Condition(), loop.queue)
    with condition:
        assert condition.wait(1e-3) is False
        condition.notify()

"""The numbered rules of `Watch`, and what it must not take for a fault."""

from __future__ import annotations

from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.connectors.transport import InFlight, Traffic
from vllm_omni_sched.connectors.watch import ADVICE, Alarm, Watch, WatchOptions

EDGE, OTHER = Edge("0", "1"), Edge("1", "2")
STALL, LEAK = 10.0, 100.0


def watch() -> Watch:
    return Watch(WatchOptions(stall_seconds=STALL, leak_seconds=LEAK))


def waiting(*since: float, got_at: float | None = None, got_put_at: float | None = None) -> Traffic:
    return Traffic([InFlight(one, 100) for one in since], [], got_at, got_put_at)


def held(*since: float) -> Traffic:
    return Traffic([], [InFlight(one, 100) for one in since], since[-1], since[-1])


def told(traffic: Traffic, now: float, watch_: Watch | None = None) -> list[tuple[Alarm, int]]:
    return [(one.alarm, one.messages) for one in (watch_ or watch()).look({("arena", EDGE): traffic}, now)]


def test_messages_come_and_none_is_got() -> None:
    assert told(waiting(0.0, 5.0, 9.0), 9.9) == []
    assert told(waiting(0.0, 5.0, 9.0), 10.1) == [(Alarm.STALL, 3)]
    assert told(waiting(0.0, 5.0, 9.0, got_at=-3.0), 10.1) == [(Alarm.STALL, 3)]


def test_an_edge_from_which_something_is_got_is_no_stall() -> None:
    assert told(waiting(0.0, 5.0, 9.0, got_at=8.0), 17.0) == []


def test_an_idle_edge_is_no_stall() -> None:
    assert told(Traffic(got_at=1.0), 1000.0) == []
    assert told(waiting(), 1000.0) == []
    assert told(waiting(0.0), 50.0) == [], "one message that nobody wants, and no other"


def test_a_message_after_a_long_pause_is_no_stall_for_what_was_left_behind_before() -> None:
    left_behind = (0.0, 1.0)
    assert told(waiting(*left_behind, 80.0, got_at=2.0), 80.1) == []
    assert told(waiting(*left_behind, 80.0, 85.0, got_at=2.0), 90.2) == [(Alarm.STALL, 2)]


def test_a_stall_is_told_once_and_lasts_until_something_is_got() -> None:
    one = watch()
    assert told(waiting(0.0, 9.0), 11.0, one) == [(Alarm.STALL, 2)]
    assert told(waiting(0.0, 9.0, 30.0), 60.0, one) == []
    assert [finding.messages for finding in one.current.values()] == [3], "it is brought up to date"
    assert told(waiting(30.0, got_at=61.0, got_put_at=9.0), 62.0, one) == []
    assert one.current == {}
    assert told(waiting(61.0, 62.0, got_at=61.0, got_put_at=9.0), 72.5, one) == [(Alarm.STALL, 2)]
    assert one.counts == {(Alarm.STALL, EDGE): 2}


def test_messages_that_are_held_for_long() -> None:
    assert told(held(0.0, 50.0), 99.0) == []
    assert told(held(0.0, 50.0), 101.0) == [(Alarm.HELD, 1)]
    assert told(held(0.0, 50.0), 151.0) == [(Alarm.HELD, 2)]


def test_messages_that_later_ones_have_overtaken() -> None:
    assert told(waiting(0.0, 150.0, got_at=150.5, got_put_at=149.0), 151.0) == [(Alarm.UNCLAIMED, 1)]
    slow_but_in_order = waiting(10.0, 20.0, got_at=150.0, got_put_at=9.0)
    assert told(slow_but_in_order, 151.0) == []


def test_messages_that_nobody_has_wanted_for_long() -> None:
    assert told(waiting(0.0), 101.0) == [(Alarm.UNCLAIMED, 1)]


def test_each_edge_and_path_for_itself() -> None:
    one = watch()
    busy = {("arena", EDGE): waiting(0.0, 9.0), ("mooncake", OTHER): held(-200.0), ("arena", OTHER): waiting()}
    found = {(f.alarm, f.transport, f.edge) for f in one.look(busy, 11.0)}
    assert found == {(Alarm.STALL, "arena", EDGE), (Alarm.HELD, "mooncake", OTHER)}


def test_a_finding_names_edge_numbers_and_what_to_do() -> None:
    (finding,) = watch().look({("arena", EDGE): waiting(0.0, 9.0)}, 20.0)
    text = str(finding)
    for word in ("stall", "0->1", "arena", "2 messages", "200 bytes", "20 s", ADVICE[Alarm.STALL]):
        assert word in text
    assert set(ADVICE) == set(Alarm)

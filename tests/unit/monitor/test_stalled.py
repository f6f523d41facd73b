"""Requests that make no progress are found, and no others."""

from collections.abc import Callable

import pytest

from vllm_omni_sched.monitor.recovery.stalled import RequestView, StalledRequests


def runs(request_id: str) -> RequestView:
    return RequestView(waits=False)


def waits(request_id: str) -> RequestView:
    return RequestView(waits=True)


def streams(request_id: str) -> RequestView:
    return RequestView(waits=False, streaming=True)


def belongs_to_a_session(request_id: str) -> RequestView:
    return RequestView(waits=False, session_owned=True)


def test_one_without_progress_stalls_once() -> None:
    stalled = StalledRequests(10.0)
    stalled.arrived("a", 0.0)
    assert stalled.overdue(9.0, runs) == []
    assert stalled.overdue(10.0, runs) == [("a", 10.0)]
    assert stalled.overdue(99.0, runs) == []


def test_one_that_makes_progress_never_does() -> None:
    stalled = StalledRequests(10.0)
    stalled.arrived("slow", 0.0)
    for now in range(0, 1000, 9):
        stalled.progressed("slow", float(now))
        assert stalled.overdue(float(now), runs) == []


def test_one_that_waits_does_not_while_others_get_on() -> None:
    stalled = StalledRequests(10.0)
    stalled.arrived("waits", 0.0)
    stalled.arrived("runs", 0.0)
    for now in range(0, 100, 5):
        stalled.progressed("runs", float(now))
        assert stalled.overdue(float(now), lambda name: RequestView(name == "waits")) == []
    assert [name for name, _ in stalled.overdue(105.0, waits)] == ["waits", "runs"], "nothing moves any more"


def test_what_has_left_or_never_came_is_not_watched() -> None:
    stalled = StalledRequests(1.0)
    stalled.arrived("a", 0.0)
    stalled.forget("a")
    stalled.progressed("a", 0.5)
    assert (len(stalled), stalled.overdue(5.0, runs)) == (0, [])


def test_without_a_deadline_nothing_stalls() -> None:
    stalled = StalledRequests(None)
    stalled.arrived("a", 0.0)
    assert stalled.overdue(1e9, runs) == []


@pytest.mark.parametrize("session", [streams, belongs_to_a_session])
def test_the_clock_of_a_session_restarts(session: Callable[[str], RequestView]) -> None:  # rule 5
    stalled = StalledRequests(10.0)
    stalled.arrived("a", 0.0)
    assert stalled.overdue(10.0, session) == []
    assert len(stalled) == 1
    assert stalled.overdue(19.0, runs) == []
    assert stalled.overdue(20.0, runs) == [("a", 10.0)], "its input is complete, so it is a session no longer"


def test_progress_of_a_companion_counts_for_its_request() -> None:  # rule 6
    stalled = StalledRequests(10.0)
    stalled.arrived("a", 0.0)
    stalled.progressed("a-companion", 8.0, parent="a")
    assert len(stalled) == 1
    assert stalled.overdue(17.0, runs) == []
    assert stalled.overdue(18.0, runs) == [("a", 10.0)]

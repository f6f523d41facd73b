"""Requests that make no progress are found, and no others."""

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.monitor.recovery.stalled import StalledRequests


def runs(request_id: str) -> bool:
    return False


def waits(request_id: str) -> bool:
    return True


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
        assert stalled.overdue(float(now), lambda name: name == "waits") == []
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


def test_a_deadline_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="deadline_seconds"):
        StalledRequests(0.0)

"""The order in which paths are tried."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.connectors.routing.route import (
    RetrySchedule,
    RouteReason,
    TransportState,
    route,
)

NEAR, FAR = TransportState("near", 0), TransportState("far", 1)


def tried(*states: TransportState) -> list[tuple[str, str]]:
    return [(attempt.name, attempt.reason.value) for attempt in route(states)]


def test_the_nearest_comes_first() -> None:
    assert tried(FAR, NEAR) == [("near", "nearest"), ("far", "next")]


def test_who_does_not_reach_the_receiver_is_not_tried() -> None:
    assert tried(TransportState("near", 0, reaches=False), FAR) == [("far", "only")]
    assert tried(TransportState("near", 0, reaches=False)) == []


def test_a_sick_path_waits_for_its_trial_and_is_the_last_resort() -> None:
    assert tried(TransportState("near", 0, well=False), FAR) == [
        ("far", "nearest"),
        ("near", "last_resort"),
    ]
    assert tried(TransportState("near", 0, well=False, trial=True), FAR) == [("near", "trial"), ("far", "nearest")]


states = st.lists(
    st.builds(
        TransportState,
        name=st.sampled_from("abcdef"),
        distance=st.integers(0, 2),
        reaches=st.booleans(),
        well=st.booleans(),
        trial=st.booleans(),
    ),
    unique_by=lambda state: state.name,
)


@given(states)
def test_every_path_that_reaches_is_tried_once_and_well_ones_before_the_last_resort(
    found: list[TransportState],
) -> None:
    attempts = route(found)
    assert sorted(attempt.name for attempt in attempts) == sorted(state.name for state in found if state.reaches)
    last = [attempt.reason is RouteReason.LAST_RESORT for attempt in attempts]
    assert last == sorted(last)
    assert sum(attempt.reason is RouteReason.TRIAL for attempt in attempts) <= 1


def test_a_refusal_is_waited_out_longer_each_time_and_forgotten_with_the_first_success() -> None:
    retries = RetrySchedule()
    due = []
    for _ in range(8):
        retries.refused(now=10.0)
        due.append(next(seconds for seconds in (0.5, 1, 2, 4, 8, 16, 30) if retries.is_due(10.0 + seconds)))
    assert due == [0.5, 1, 2, 4, 8, 16, 30, 30]
    retries.took()
    assert (retries.well, retries.is_due(99.0)) == (True, False)

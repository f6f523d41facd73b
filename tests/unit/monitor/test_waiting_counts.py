"""The number of waiting requests by class, over any sequence of events."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.monitor.counts import CLASSES, SchedulerMetrics
from vllm_omni_sched.monitor.waiting_counts import WaitingCounts

ENTER = ("enter", "r", "batch")
START, AGAIN, LEAVE = (("start", "r"), ("wait_again", "r"), ("leave", "r"))


def after(*events: tuple[str, ...]) -> tuple[dict[str, int], int]:
    """Return the numbers of waiting requests, without those that are 0, and how many requests are known."""
    metrics = SchedulerMetrics()
    counts = WaitingCounts(metrics)
    for name, *arguments in events:
        getattr(counts, name)(*arguments)
    return {name: number for name, number in metrics.waiting_requests.items() if number}, len(counts)


@pytest.mark.parametrize(
    ("events", "waiting", "known"),
    [
        ([ENTER], {"batch": 1}, 1),
        ([ENTER, START], {}, 1),
        ([ENTER, START, AGAIN], {"batch": 1}, 1),  # preempted, or a session between two inputs
        ([ENTER, START, AGAIN, START], {}, 1),
        ([ENTER, START, LEAVE], {}, 0),
        ([ENTER, LEAVE], {}, 0),  # aborted while it waited
        ([ENTER, START, AGAIN, LEAVE], {}, 0),
        ([ENTER, START, AGAIN, AGAIN], {"batch": 1}, 1),  # preempted, and stopped by a token in flight
        ([ENTER, START, START], {}, 1),
        ([ENTER, START, LEAVE, AGAIN], {}, 0),  # the output of one that has ended
        ([START, AGAIN, LEAVE], {}, 0),  # refused: it never entered
        ([ENTER, ("enter", "s", "realtime"), ("enter", "t", "batch"), START], {"batch": 1, "realtime": 1}, 3),
    ],
)
def test_a_request_counts_in_its_class_while_it_waits(events, waiting, known):
    assert after(*events) == (waiting, known)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["enter", "start", "wait_again", "leave"]), st.integers(0, 5), st.sampled_from(CLASSES))
)


@given(EVENTS)
def test_counts_are_never_negative_and_those_of_the_requests_that_wait(events):
    """Against the plainest book: where each request is, counted anew after every event."""
    metrics = SchedulerMetrics()
    counts = WaitingCounts(metrics)
    of_class: dict[int, str] = {}
    waits: dict[int, bool] = {}
    for event, who, name in events:
        if event == "enter":
            if who in of_class:
                continue  # vLLM has a request once
            counts.enter(str(who), name)
            of_class[who], waits[who] = name, True
            continue
        getattr(counts, event)(str(who))
        if who in of_class:
            waits[who] = event == "wait_again"
        if event == "leave":
            of_class.pop(who, None)
            waits.pop(who, None)
        expected = {one: sum(waits[i] for i, of in of_class.items() if of == one) for one in CLASSES}
        assert metrics.waiting_requests == expected
        assert len(counts) == len(of_class)
    for who in list(of_class):
        counts.leave(str(who))
    assert metrics.waiting_requests == dict.fromkeys(CLASSES, 0)
    assert len(counts) == 0

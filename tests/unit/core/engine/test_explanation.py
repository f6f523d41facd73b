"""What the history of a request says, in sentences, and for what the request waited."""

from __future__ import annotations

import pytest

from vllm_omni_sched.core.engine.explanation import (
    PLACEMENTS,
    PLACES,
    ROUNDS,
    WaitCause,
    sentence_of,
    summary_of,
    waits_of,
)
from vllm_omni_sched.core.engine.history import Transition
from vllm_omni_sched.core.engine.history_lines import HistoryLine
from vllm_omni_sched.graph.order import PlaceReason
from vllm_omni_sched.resource.engine.encode_rounds import RoundReason
from vllm_omni_sched.resource.engine.lane import WhereReason


def lines(*told: tuple[float, str, str] | tuple[float, str]) -> list[HistoryLine]:
    return [HistoryLine(at, transition, "r", *detail) for at, transition, *detail in told]


LANE = lines(
    (10.0, "entered", "interactive"),
    (10.5, "placed", "would_stall_decode"),
    (10.5, "held", "for 2 items"),
    (11.0, "encoded", "a"),
    (12.0, "encoded", "b"),
    (12.25, "taken", "deadline"),
    (12.25, "started", "16"),
    (12.5, "first_token"),
    (20.0, "left", "stopped"),
)


@pytest.mark.parametrize(
    ("sentences", "reasons"), [(PLACEMENTS, WhereReason), (PLACES, PlaceReason), (ROUNDS, RoundReason)]
)
def test_every_reason_has_a_sentence(sentences, reasons):
    assert set(sentences) == {reason.value for reason in reasons}
    assert len(set(sentences.values())) == len(sentences)


@pytest.mark.parametrize("transition", Transition)
def test_every_transition_is_a_sentence(transition):
    said = sentence_of(HistoryLine(0.0, transition.value, "r", "for 2 items"))
    assert said[0].isupper()
    assert said.endswith(".")
    assert "  " not in said


def test_the_sentences_of_a_request_that_waited_for_the_lane():
    assert [sentence_of(one) for one in LANE] == [
        "It entered, as a request of the class interactive.",
        "Its next items are encoded in the lane, because in the step it would delay requests that decode.",
        "It was held back: it waits for 2 items of the lane.",
        "The lane had encoded item a.",
        "The lane had encoded item b.",
        "It was taken from the queue, because its deadline was the next one to be missed.",
        "It started: its first tokens were scheduled; 16 of them were in the prefix cache.",
        "It got its first token.",
        "It left (stopped).",
    ]


def test_the_wait_is_divided_by_cause():
    assert waits_of(LANE) == {WaitCause.LANE: 1.5, WaitCause.QUEUE: 0.75, WaitCause.COMPUTING: 0.25}
    assert list(waits_of(LANE)) == [WaitCause.LANE, WaitCause.QUEUE, WaitCause.COMPUTING]  # the longest first
    assert summary_of(LANE) == (
        "It waited 2.500 s for its first token: 1.500 s for items that are encoded in the lane, "
        "0.750 s in the queue, for its turn and for room in the engine, 0.250 s while its prompt was computed."
    )


def test_a_request_whose_first_lines_are_gone():
    assert summary_of(LANE[4:]).endswith("Its first lines are no longer in the file.")

"""What the pipeline core decides, as entries of the journal of faults."""

from __future__ import annotations

import math

import pytest

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.monitor.journal.fault import MOST_TEXT, Fault, FaultKind, fault_of, line_of
from vllm_omni_sched.monitor.journal.recorder import FaultRecorder
from vllm_omni_sched.monitor.recovery.events import Incident, IncidentKind, Replica
from vllm_omni_sched.monitor.recovery.remedies import RemedyStep

ONE, OTHER = Replica(1, 0), Replica(1, 1)
WALL = 1.7e9


@pytest.fixture
def entries() -> list[Fault]:
    return []


@pytest.fixture
def recorder(entries: list[Fault]) -> FaultRecorder:
    return FaultRecorder({0: "thinker", 1: "talker"}, entries.append, lambda: WALL + len(entries))


def test_an_outage_is_timed_by_the_monotonic_clock_and_told_with_its_requests(
    recorder: FaultRecorder, entries: list[Fault]
) -> None:
    for at, kind, requests in (
        (10.0, IncidentKind.SUSPECTED, 0),
        (13.0, IncidentKind.DIED, 4),
        (13.5, IncidentKind.RESTARTING, 0),
        (25.0, IncidentKind.BACK, 0),
    ):
        recorder.incident(Incident(at, ONE, kind, "why" if requests else "", requests))
    assert [(one.at, one.kind, one.seconds, one.requests) for one in entries] == [
        (WALL, "suspected", None, 0),
        (WALL + 1, "died", 3.0, 4),
        (WALL + 2, "restarting", 3.5, 0),
        (WALL + 3, "back", 15.0, 4),
    ]
    assert {(one.stage, one.name, one.replica) for one in entries} == {(1, "talker", 0)}
    assert entries[1].cause == "why"


def test_outages_of_replicas_are_apart_and_end(recorder: FaultRecorder, entries: list[Fault]) -> None:
    recorder.incident(Incident(1.0, ONE, IncidentKind.DIED, requests=2))
    recorder.incident(Incident(2.0, OTHER, IncidentKind.DRAINING))
    recorder.incident(Incident(4.0, OTHER, IncidentKind.STAYED))
    recorder.incident(Incident(5.0, ONE, IncidentKind.BACK))
    recorder.incident(Incident(9.0, ONE, IncidentKind.DIED))
    assert [(one.kind, one.seconds) for one in entries] == [
        ("died", None),
        ("draining", None),
        ("stayed", 2.0),
        ("back", 4.0),
        ("died", None),
    ]


def test_an_anomaly_has_its_evidence_and_its_age(recorder: FaultRecorder, entries: list[Fault]) -> None:
    evidence = {"seconds": 7.0, "usual": math.inf}
    recorder.anomaly(1, Anomaly(AnomalyKind.STAGE_TIMEOUT, "talker (1)", 100.0, evidence, "r"), now=107.5)
    recorder.anomaly(0, Anomaly(AnomalyKind.SILENT_REPLICA, "thinker (0) replica 2", 1.0, {"replica": 2.0}), now=1.0)
    first, second = entries
    assert (first.kind, first.seconds, first.request_id, first.requests) == ("stage_timeout", 7.5, "r", 1)
    assert (second.name, second.replica, second.requests) == ("thinker", 2, 0)
    assert fault_of(line_of(first)).evidence == {"seconds": 7.0}  # JSON has no infinity


def test_requests_that_run_again_or_fail_are_counted(recorder: FaultRecorder, entries: list[Fault]) -> None:
    recorder.redispatched(1, 3, ("a", "b"))
    recorder.failed(0, "c", "poison", "the replica that ran it died (poison)")
    recorder.failed(7, "d", "waited", "none came back")
    recorder.killed(1, 0, 60.0)
    assert [(one.kind, one.requests, one.request_id, one.replica) for one in entries] == [
        ("redispatched", 2, "a", 3),
        ("failed", 1, "c", -1),
        ("failed", 1, "d", -1),
        ("killed", 0, "", 0),
    ]
    assert [one.cause for one in entries[1:3]] == ["the replica that ran it died (poison)", "none came back (waited)"]
    assert entries[2].name == ""


@pytest.mark.parametrize("text", ["a\nb", "\ud800", "\x00", "x" * 10_000])
def test_any_text_is_one_bounded_line(text: str) -> None:
    line = line_of(Fault(1.0, FaultKind.FAILED.value, request_id=text, cause=text, name=text))
    assert line.count(b"\n") == 1
    assert len(line) < 3 * 6 * MOST_TEXT + 100
    assert fault_of(line).kind == "failed"


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"at": "now", "kind": "died"}', b'{"at": 1}', b"\xff"])
def test_what_is_no_entry_is_an_error(line: bytes) -> None:
    with pytest.raises(ConfigError, match="not an entry of a journal"):
        fault_of(line)


def test_kinds_are_told_apart() -> None:
    kinds = [kind.value for which in (FaultKind, IncidentKind, AnomalyKind, RemedyStep) for kind in which]
    assert len(kinds) == len(set(kinds))

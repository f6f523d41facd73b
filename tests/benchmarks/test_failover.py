"""Test what `benchmarks.failover` makes of rounds of faults and of the journal; no engine runs here."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.failover import faults
from vllm_omni_sched.monitor.journal.fault import Fault


def told(**how: Any) -> dict[str, Any]:
    return {"answer": {"text": {"1": [1]}}, "ends": {"0": 1, "1": 1}, "error": None, "hangs": False} | how


def played(kind: str, at: float, replicas: list[int], answers: list[dict[str, Any]] | None = None) -> faults.Round:
    calm = {"told": [told(), told()]}
    wave = {"told": answers or [told(), told()], "at": at, "back": True}
    return {"kind": kind, "replicas": replicas, "wave": wave, "undisturbed": calm}


def entries(replica: int, *of: tuple[str, float, float | None]) -> list[Fault]:
    """Entries of one replica: kind, wall-clock time, seconds since the outage began."""
    return [Fault(at, kind, faults.REPLICATED, "talker", replica, seconds=seconds) for kind, at, seconds in of]


KILLED = entries(0, ("died", 100.5, None), ("restarting", 100.6, 0.1), ("back", 106.5, 6.0))
STOPPED = entries(
    1,
    ("suspected", 201.0, None),
    ("killed", 203.0, 2.0),
    ("died", 203.2, 2.2),
    ("restarting", 203.3, 2.3),
    ("restart_failed", 204.3, 3.3),
    ("restarting", 204.5, 3.5),
    ("back", 210.0, 9.0),
)


def test_outages_are_those_that_the_journal_tells_of_after_the_fault_of_a_round() -> None:
    rounds = [played("killed", 100.0, [0]), played("stopped", 200.0, [1])]
    found = faults.outages(rounds, [*KILLED, *STOPPED])
    killed = faults.Outage("killed", noticed=0.5, back=6.5, start=5.9, after_death=6.0)
    stopped = faults.Outage("stopped", noticed=3.2, back=10.0, start=5.5, after_death=6.8)
    for one, other in zip(found, (killed, stopped), strict=True):
        assert vars(one) == pytest.approx(vars(other))


def records(rounds: list[faults.Round], journal: list[Fault]) -> dict[str, dict[str, Any]]:
    found = [*faults.counts(rounds, journal), *faults.record(rounds, faults.outages(rounds, journal))]
    return {one["measure"]: one for one in found}


def test_the_bars_are_met_when_nothing_is_lost_and_recovery_adds_little() -> None:
    found = records([played("killed", 100.0, [0]), played("stopped", 200.0, [1])], [*KILLED, *STOPPED])
    assert found["outages that the journal does not tell"]["ours"]["most"] == 0
    judged = {name: one["met"] for name, one in found.items() if "met" in one}
    assert set(judged.values()) == {True}
    beyond = found["stopped: from its death until it served again, beyond its start"]["ours"]["median"]
    assert beyond == pytest.approx(1.3)
    assert found["killed: until it served again, beyond its start"]["ours"]["median"] == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("answer", "measure"),
    [
        (told(error="dead", answer=None), "requests lost"),
        (told(error="no answer in time", answer=None, hangs=True), "requests that hang"),
        (told(ends={"0": 1, "1": 2}), "requests answered twice"),
        (told(answer={"text": {"1": [2]}}), "answers other than undisturbed"),
    ],
)
def test_each_failure_of_a_request_misses_its_own_bar(answer: dict[str, Any], measure: str) -> None:
    found = records([played("killed", 100.0, [0], [told(), answer])], KILLED)
    assert [name for name, one in found.items() if one.get("met") is False] == [measure]
    assert found[measure]["ours"]["most"] == 1

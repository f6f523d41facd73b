"""Test what `benchmarks.failover` makes of rounds of faults and of the journal; no engine runs here."""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.failover import faults, hosts
from benchmarks.failover.__main__ import parse
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


def test_what_happened_before_or_to_another_replica_is_none_of_them() -> None:
    assert faults.outages([played("killed", 107.0, [0])], KILLED) == []
    assert faults.outages([played("killed", 100.0, [1])], KILLED) == []
    assert faults.outages([played("killed", 100.0, [0])], KILLED[:2]) == []  # it has not come back


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


def test_a_replica_that_is_late_or_does_not_come_back_misses_a_bar() -> None:
    late = entries(0, ("died", 104.0, None), ("restarting", 104.0, 0.0), ("back", 110.0, 6.0))
    found = records([played("killed", 100.0, [0])], late)
    assert found["killed: until it served again, beyond its start"]["met"] is False
    one = played("killed", 100.0, [0])
    one["wave"]["back"] = False
    assert records([one], KILLED[:2])["replicas that did not come back"]["met"] is False


def test_a_failover_that_is_late_or_does_not_happen_misses_a_bar() -> None:
    def judged(*found: hosts.Failover | None) -> dict[str, bool]:
        return {one["measure"]: one["met"] for one in hosts.record("faults", found) if "met" in one}

    good = hosts.Failover("whole host", noticed=1.2, taken_over=1.4, back=9.0)
    late = hosts.Failover("link cut", noticed=1.2, taken_over=2.1, back=4.0)
    whole, taken = "faults of hosts after which not all was as before", "until the standby ran its requests"
    assert judged(good) == {whole: True, f"whole host: {taken}": True}
    assert judged(good, late) == {whole: True, f"whole host: {taken}": True, f"link cut: {taken}": False}
    assert judged(good, None)[whole] is False
    assert judged() == {}


class Machine:
    """Hosts and a front end for `hosts.play`, which the test makes answer."""

    def __init__(self) -> None:
        self.main, self.standby = SimpleNamespace(address="main"), SimpleNamespace(address="standby")
        self.did: list[str] = []
        self.up = {"main": 1, "standby": 2}

    def ask(self, requests: list[Any]) -> None:
        self.did.append(f"asks {len(requests)}")

    def told(self, requests: list[Any]) -> list[dict[str, Any]]:
        return [told() for _ in requests]

    def serving(self) -> dict[str, int]:
        return self.up

    def running(self, host: Any) -> int:
        return 2

    def fault(self, kind: str) -> None:
        self.did.append(kind)
        del self.up["main"]

    def mend(self, kind: str) -> None:
        self.did.append(f"mends {kind}")
        self.up["main"] = 3

    def wait(self, condition: Callable[[], Any]) -> float | None:
        return time.monotonic() if condition() else None


def test_a_round_of_a_host_asks_twice_and_has_its_fault_meanwhile() -> None:
    machine = Machine()
    played, failover = hosts.play(machine, "link cut", Random(0))  # type: ignore[arg-type]
    assert machine.did == ["asks 12", "asks 12", "link cut", "mends link cut"]
    assert failover is not None
    assert 0 <= failover.noticed <= failover.taken_over <= failover.back
    assert {one["met"] for one in faults.counts([played], []) if "met" in one} == {True}


def test_a_standby_that_does_not_take_over_is_no_failover() -> None:
    machine = Machine()
    machine.running = lambda host: 2 if host is machine.main else 0  # type: ignore[method-assign]
    _, failover = hosts.play(machine, "whole host", Random(0))  # type: ignore[arg-type]
    assert failover is None


def test_forty_rounds_are_the_default() -> None:
    assert parse([]).rounds == 40

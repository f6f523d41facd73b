"""Which replica counts as hanging, and what follows: a test for each numbered rule of `ReplicaHangs`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.core.pipeline.hangs import HangAction, HangStep, ReplicaHangs, ReplicaView, ReplicaWork
from vllm_omni_sched.graph.stages import Stage, StageGraph, StageKind
from vllm_omni_sched.monitor.anomaly import Silence

REPORT, SUSPECT, TRUST, KILL, FORGET = HangStep
WORK = ReplicaWork(sent=True, upstream=False, expected_seconds=0.0)
BOUND = 10.0  # seconds of silence of a stage that is not known yet


class Replicas:
    """Replicas of two stages, checked every second. By default they have work, send nothing and compute nothing."""

    def __init__(self, *keys: tuple[int, int], hang_seconds: float | None = 5.0, interval_seconds: float = 1.0) -> None:
        names = {0: "thinker (0)", 1: "talker (1)"}
        self.hangs = ReplicaHangs(names, hang_seconds, interval_seconds, Silence(cap_seconds=BOUND))
        self.now = 0.0
        self.readings: list[tuple[str, float]] = []  # what was inspected, and when
        self.present: dict[tuple[int, int], dict[str, Any]] = {}
        for key in keys or ((0, 0),):
            self.put(*key)

    def put(self, stage_id: int, replica_id: int, **state: Any) -> None:
        """Set what a replica shows from now on; ``used``: its processor time."""
        default: dict[str, Any] = {
            "client": "first",
            "local": True,
            "works": (WORK,),
            "owes": False,
            "stopped": False,
            "used": 0.0,
        }
        self.present[stage_id, replica_id] = default | self.present.get((stage_id, replica_id), {}) | state

    def view(self, key: tuple[int, int]) -> ReplicaView:
        state = self.present[key]

        def read(what: str) -> Any:
            self.readings.append((what, self.now))
            return state[what]

        return ReplicaView(
            *key,
            client=state["client"],
            local=state["local"],
            works=state["works"],
            owes=lambda: bool(read("owes")),
            stopped=lambda: bool(read("stopped")),
            cpu_seconds=lambda: read("used"),
        )

    def check(self) -> list[HangAction]:
        actions = self.hangs.check(self.now, [self.view(key) for key in self.present])
        self.hangs.validate()
        return actions

    def after(self, seconds: int, each: float = 1.0) -> list[tuple[HangStep, int, int, float]]:
        """Let time pass, with a check after each second; return the steps and when they were taken."""
        found = []
        for _ in range(seconds):
            self.now += each
            found += [(one.step, one.stage_id, one.replica_id, self.now) for one in self.check()]
        return found


def steps(found: list[tuple[HangStep, int, int, float]]) -> list[HangStep]:
    return [step for step, *_ in found]


@pytest.mark.parametrize(
    ("works", "hangs"),
    [
        ((WORK,), True),
        ((), False),
        ((WORK._replace(sent=False),), False),
        ((WORK._replace(upstream=True),), False),
        ((WORK._replace(upstream=True), WORK), True),
    ],
)
def test_work_counts_once_it_was_sent_and_the_earlier_stages_are_done_with_it(  # rule 2
    works: tuple[ReplicaWork, ...], hangs: bool
) -> None:
    replicas = Replicas()
    replicas.put(0, 0, works=works)
    assert steps(replicas.after(13)) == [SUSPECT] * hangs


@pytest.mark.parametrize(("owes", "stopped", "hangs"), [(True, True, True), (True, False, False), (False, True, False)])
def test_one_without_requests_has_work_while_it_is_stopped_and_owes_an_output(  # rule 3
    owes: bool, stopped: bool, hangs: bool
) -> None:
    replicas = Replicas()
    replicas.put(0, 0, works=(), owes=owes, stopped=stopped)
    assert steps(replicas.after(13)) == [SUSPECT] * hangs


def test_its_processes_are_looked_at_only_if_it_owes_an_output() -> None:  # rule 3
    replicas = Replicas()
    replicas.put(0, 0, works=())
    replicas.after(3)
    assert {what for what, _ in replicas.readings} == {"owes"}


def test_one_on_another_host_is_not_checked() -> None:  # rule 4
    replicas = Replicas()
    replicas.put(0, 0, local=False, owes=True, stopped=True)
    assert replicas.after(30) == []
    assert replicas.readings == []


def test_processor_time_is_read_only_after_an_interval_of_silence() -> None:  # rule 5
    replicas = Replicas()
    replicas.put(0, 0, works=())
    replicas.after(2)
    replicas.readings.clear()
    replicas.put(0, 0, works=(WORK,))
    replicas.after(1)
    assert replicas.readings == []
    replicas.after(1)
    assert replicas.readings == [("used", 4.0)]


@pytest.mark.parametrize(("each", "hangs"), [(0.0, True), (0.04, True), (0.06, False), (1.0, False), (None, False)])
def test_one_that_uses_a_twentieth_of_a_processor_or_of_which_that_is_unknown_computes(  # rule 5
    each: float | None, hangs: bool
) -> None:
    replicas, found = Replicas(), []
    for second in range(14):
        replicas.put(0, 0, used=None if each is None else each * second)
        found += replicas.after(1)
    assert steps(found) == [SUSPECT] * hangs


def test_the_silence_of_its_stage_decides() -> None:  # rule 6
    replicas = Replicas()
    replicas.hangs.silence.least_samples = 1
    replicas.after(1)
    replicas.hangs.heard(0, 0, 1.5)
    assert steps(replicas.after(6)) == [SUSPECT], "four times half a second is over, not ten"


def test_the_longest_request_that_counts_may_take_its_time() -> None:  # rules 2 and 6
    replicas = Replicas()
    replicas.hangs.silence.least_samples = 1
    late = WORK._replace(expected_seconds=9.0, upstream=True)
    replicas.put(0, 0, works=(WORK, late, WORK._replace(expected_seconds=1.5)))
    replicas.after(1)
    replicas.hangs.heard(0, 0, 1.5)
    assert replicas.after(8) == []
    assert steps(replicas.after(1)) == [SUSPECT]


def test_one_that_begins_to_hang_is_reported_once_and_suspected() -> None:  # rule 7
    replicas = Replicas((0, 0), (1, 3))
    replicas.put(0, 0, works=())
    replicas.after(12)
    replicas.now += 1.0
    assert replicas.check() == [HangAction(SUSPECT, 1, 3, "talker (1) replica 3", 11.0)]
    assert replicas.after(4) == []


def test_without_hang_seconds_it_is_only_reported() -> None:  # rule 7
    replicas = Replicas(hang_seconds=None)
    assert replicas.after(100) == [(REPORT, 0, 0, 13.0)]
    replicas.hangs.heard(0, 0, 100.5)
    assert replicas.after(2) == [], "nothing was taken from it"
    assert steps(replicas.after(13)) == [REPORT]


@pytest.mark.parametrize("how", ["sends", "computes", "has no work"])
def test_one_that_no_longer_hangs_is_trusted_again(how: str) -> None:  # rule 8
    replicas = Replicas()
    replicas.after(14)
    if how == "sends":
        replicas.hangs.heard(0, 0, 14.5)
    else:
        replicas.put(0, 0, **({"used": 1.0} if how == "computes" else {"works": ()}))
    assert replicas.after(4) == [(TRUST, 0, 0, 15.0)]


def test_one_that_still_hangs_is_killed_once() -> None:  # rule 9
    replicas = Replicas()
    assert replicas.after(17) == [(SUSPECT, 0, 0, 13.0)]
    replicas.now += 1.0
    assert replicas.check() == [HangAction(KILL, 0, 0, "thinker (0) replica 0", 5.0)]
    assert replicas.after(100) == []


GRAPH = StageGraph.of([Stage(0, "thinker", StageKind.AR, (), final_output=True)])


def of(**options: Any) -> ReplicaHangs | None:
    return ReplicaHangs.of(StageSchedConfig(**options), GRAPH)


@pytest.mark.parametrize("monitoring", [{"enabled": False}, {"anomaly": {"enabled": False}}])
def test_it_is_absent_where_hangs_are_not_detected(monitoring: dict[str, Any]) -> None:
    assert of(monitoring=monitoring) is None


@given(st.lists(st.integers(1, 9), max_size=30))
def test_one_that_speaks_often_enough_is_never_touched(gaps: list[int]) -> None:
    replicas = Replicas()
    for seconds in gaps:
        assert replicas.after(seconds) == []
        replicas.hangs.heard(0, 0, replicas.now)

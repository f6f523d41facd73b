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


def test_checks_are_an_interval_apart() -> None:  # rule 1
    replicas = Replicas(interval_seconds=2.0)
    assert replicas.hangs.is_due(0.0)
    replicas.check()
    assert not replicas.hangs.is_due(1.9)
    assert replicas.hangs.is_due(2.0)


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


def test_a_first_reading_counts_as_computing() -> None:  # rule 5
    replicas = Replicas()
    replicas.after(2)  # the first reading is at 2
    assert replicas.after(10) == []
    assert replicas.after(1) == [(SUSPECT, 0, 0, 13.0)]


def test_an_unknown_time_after_a_known_one_counts_as_computing() -> None:  # rule 5
    replicas = Replicas()
    replicas.after(12)
    replicas.put(0, 0, used=None)
    assert replicas.after(1) == [], "it would hang from now on"
    replicas.put(0, 0, used=0.0)
    assert replicas.after(11) == []
    assert replicas.after(1) == [(SUSPECT, 0, 0, 25.0)], "the reading at 14 was a first one again"


def test_a_reading_from_before_the_last_message_does_not_count() -> None:  # rule 5
    replicas = Replicas()
    replicas.after(9)
    replicas.hangs.heard(0, 0, 9.0)
    replicas.now = 9.5
    replicas.check()  # silent for less than an interval
    assert replicas.after(11) == []
    assert replicas.after(1) == [(SUSPECT, 0, 0, 21.5)], "the reading at 10.5 was a first one"


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


def test_one_that_hangs_again_has_all_its_time_again() -> None:  # rules 8 and 9
    replicas = Replicas()
    replicas.after(16)
    replicas.hangs.heard(0, 0, 16.5)
    found = replicas.after(30)
    assert steps(found) == [TRUST, SUSPECT, KILL]
    assert found[2][3] - found[1][3] == 5.0


def test_one_that_still_hangs_is_killed_once() -> None:  # rule 9
    replicas = Replicas()
    assert replicas.after(17) == [(SUSPECT, 0, 0, 13.0)]
    replicas.now += 1.0
    assert replicas.check() == [HangAction(KILL, 0, 0, "thinker (0) replica 0", 5.0)]
    assert replicas.after(100) == []


@pytest.mark.parametrize("how", ["sends", "has no work"])
def test_one_that_was_killed_is_never_trusted(how: str) -> None:  # rule 9
    replicas = Replicas()
    assert steps(replicas.after(18)) == [SUSPECT, KILL]
    if how == "sends":
        replicas.hangs.heard(0, 0, 18.5)
    else:
        replicas.put(0, 0, works=())
    assert replicas.after(5) == []
    replicas.put(0, 0, works=(WORK,))
    assert replicas.after(40) == []


@pytest.mark.parametrize("seconds", [14, 18])
@pytest.mark.parametrize("replaced", [False, True])
def test_one_that_is_gone_or_replaced_is_forgotten(seconds: int, replaced: bool) -> None:  # rule 10
    replicas = Replicas()
    replicas.after(seconds)
    if replaced:
        replicas.put(0, 0, client="second")
    else:
        del replicas.present[0, 0]
    assert replicas.after(3) == [(FORGET, 0, 0, seconds + 1.0)]
    replicas.put(0, 0, client="third")
    assert steps(replicas.after(30)) == [SUSPECT, KILL], "its successor starts afresh"


def test_nothing_is_done_when_one_that_nobody_suspected_is_gone() -> None:  # rule 10
    replicas = Replicas((0, 0), (0, 1))
    replicas.after(5)
    replicas.present.clear()
    assert replicas.after(2) == []


GRAPH = StageGraph.of([Stage(0, "thinker", StageKind.AR, (), final_output=True)])


def of(**options: Any) -> ReplicaHangs | None:
    return ReplicaHangs.of(StageSchedConfig(**options), GRAPH)


@pytest.mark.parametrize("monitoring", [{"enabled": False}, {"anomaly": {"enabled": False}}])
def test_it_is_absent_where_hangs_are_not_detected(monitoring: dict[str, Any]) -> None:
    assert of(monitoring=monitoring) is None


@pytest.mark.parametrize(
    ("recovery", "expected"),
    [({"hang_seconds": 2.0}, [SUSPECT, KILL]), ({"hang_seconds": None}, [REPORT]), ({"enabled": False}, [REPORT])],
)
def test_options_say_what_follows(recovery: dict[str, Any], expected: list[HangStep]) -> None:
    replicas = Replicas()
    options = {"monitoring": {"anomaly": {"max_stage_seconds": 3.0}}, "runtime": {"recovery": recovery}}
    hangs = of(**options)
    assert hangs is not None
    replicas.hangs = hangs
    assert steps(replicas.after(20)) == expected


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["nothing", "speaks", "computes", "idle", "works", "gone", "replaced"]),
        st.integers(0, 1),
        st.integers(1, 12),
    ),
    max_size=40,
)


@given(EVENTS, st.sampled_from([None, 1.0, 5.0]))
def test_each_replica_takes_its_steps_in_order(events: list[tuple[str, int, int]], hang_seconds: float | None) -> None:
    """A replica is killed once, after it was suspected for long enough; and one that speaks is trusted again."""
    replicas = Replicas((0, 0), (1, 0), hang_seconds=hang_seconds)
    state: dict[int, tuple[HangStep, float]] = {}  # the last step with each stage's replica while it is suspected
    clients = 0
    for event, stage_id, seconds in events:
        known = (stage_id, 0) in replicas.present
        match event:
            case "speaks":
                replicas.hangs.heard(stage_id, 0, replicas.now)
            case "computes" if known:
                replicas.put(stage_id, 0, used=replicas.present[stage_id, 0]["used"] + 100.0)
            case "idle" | "works" if known:
                replicas.put(stage_id, 0, works=(WORK,) if event == "works" else ())
            case "gone":
                replicas.present.pop((stage_id, 0), None)
            case "replaced":
                clients += 1
                replicas.put(stage_id, 0, client=clients)
            case _:
                pass
        for second in range(seconds):
            spoke = event in ("speaks", "computes") and second == 0
            found = replicas.after(1)
            for step, of_stage, _, now in found:
                before = state.pop(of_stage, None)
                match step:
                    case HangStep.REPORT:
                        assert hang_seconds is None
                        assert before is None
                    case HangStep.SUSPECT:
                        assert hang_seconds is not None
                        assert before is None
                        state[of_stage] = step, now
                    case HangStep.KILL:
                        assert hang_seconds is not None
                        assert before is not None
                        assert before[0] is SUSPECT
                        assert now - before[1] >= hang_seconds
                        state[of_stage] = step, now
                    case HangStep.TRUST:
                        assert before is not None
                        assert before[0] is SUSPECT
                    case HangStep.FORGET:
                        assert before is not None
            if spoke:
                assert state.get(stage_id, (KILL,))[0] is KILL, "one that speaks or computes is suspected no longer"
    replicas.present.clear()
    assert {one for _, one, *_ in replicas.after(1)} == set(state), "every suspicion ends with its replica"


@given(st.lists(st.integers(1, 9), max_size=30))
def test_one_that_speaks_often_enough_is_never_touched(gaps: list[int]) -> None:
    replicas = Replicas()
    for seconds in gaps:
        assert replicas.after(seconds) == []
        replicas.hangs.heard(0, 0, replicas.now)

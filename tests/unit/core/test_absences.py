"""What becomes of replicas on other hosts that are silent, rule by rule."""

from __future__ import annotations

from vllm_omni_sched.core.pipeline.absences import KEEP_SECONDS, AbsenceAction, Absences, AbsenceStep

USE, GIVE_UP = AbsenceStep.USE, AbsenceStep.GIVE_UP


def check(absences: Absences, now: float, *reported: str, taken: bool = False) -> list[AbsenceAction]:
    return absences.check(now, lambda stage_id: reported if stage_id == 1 else (), lambda *_: taken)


def test_a_replica_that_is_reported_again_is_used_again_once() -> None:
    absences = Absences()
    absences.silent(1, 0, "a", 10.0)
    assert check(absences, 11.0, "b") == []
    assert check(absences, 12.0, "a", "b") == [(USE, 1, 0)]
    assert check(absences, 13.0, "a") == []
    assert len(absences) == 0


def test_addresses_are_those_of_the_stage() -> None:
    absences = Absences()
    absences.silent(2, 0, "a", 10.0)
    assert check(absences, 11.0, "a") == []


def test_a_replica_whose_number_is_taken_is_given_up() -> None:
    absences = Absences()
    absences.silent(1, 0, "a", 10.0)
    assert check(absences, 10.0, "a", taken=True) == [(GIVE_UP, 1, 0)]


def test_a_replica_that_stays_silent_is_given_up() -> None:
    absences = Absences()
    absences.silent(1, 0, "a", 10.0)
    absences.silent(1, 1, "b", 20.0)
    assert check(absences, 9.0 + KEEP_SECONDS) == []
    assert check(absences, 10.0 + KEEP_SECONDS) == [(GIVE_UP, 1, 0)]
    assert len(absences) == 1

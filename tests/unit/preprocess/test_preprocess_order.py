"""The rules of `JobOrder`, one after the other."""

from __future__ import annotations

import pytest

from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, REALTIME, SlaClass
from vllm_omni_sched.preprocess.order import JobOrder, Verdict, Waiting


def job(
    task: int, sla: SlaClass = INTERACTIVE, *, arrival: float = 0.0, deadline: float = 60.0, needed: bool = False
) -> Waiting:
    return Waiting(task, sla, arrival, deadline, needed)


def order(*jobs: Waiting, max_bytes: int = 100, max_waiting: int = 8) -> JobOrder:
    found = JobOrder(max_bytes, max_waiting, max_wait_seconds=10.0)
    for one in jobs:
        assert found.add(one)
    return found


def drained(jobs: JobOrder, now: float) -> list[int]:
    found = []
    while (task := jobs.next(now, 0, 0)[0]) is not None:
        found.append(task)
    return found


def test_nothing_waits() -> None:
    assert order().next(0.0, 0, 0) == (None, Verdict.NOTHING)


def test_rule_1_a_needed_job_goes_first_even_without_room() -> None:
    jobs = order(job(1, REALTIME), job(2, needed=True, arrival=2.0), job(3, BATCH, needed=True, arrival=1.0))
    jobs.ended(100)
    assert jobs.next(3.0, 500, 2) == (3, Verdict.NEEDED)
    assert jobs.next(3.0, 500, 2) == (2, Verdict.NEEDED)
    assert jobs.next(3.0, 500, 2) == (None, Verdict.FULL)


@pytest.mark.parametrize(
    ("held", "running", "starts"),
    [(0, 0, True), (60, 0, True), (61, 0, False), (0, 1, True), (0, 2, False), (20, 1, True)],
)
def test_rule_2_a_job_starts_only_if_there_is_room(held: int, running: int, starts: bool) -> None:
    jobs = order(job(1))
    jobs.ended(40)
    task, verdict = jobs.next(0.0, held, running)
    assert (task, verdict) == ((1, Verdict.NEXT) if starts else (None, Verdict.FULL))
    assert len(jobs) == (0 if starts else 1)


def test_rule_2_one_job_always_runs() -> None:
    jobs = order(job(1))
    jobs.ended(1000)
    assert jobs.next(0.0, 0, 0) == (1, Verdict.NEXT)


def test_rule_3_classes_then_deadlines() -> None:
    jobs = order(
        job(1, BATCH, deadline=5.0), job(2, deadline=9.0), job(3, deadline=7.0), job(4, REALTIME, deadline=50.0)
    )
    assert drained(jobs, 0.0) == [4, 3, 2, 1]


def test_rule_3_a_job_that_waited_long_overtakes_other_classes() -> None:
    jobs = order(job(1, BATCH, arrival=0.0), job(2, REALTIME, arrival=9.0))
    assert drained(jobs, 10.0) == [1, 2]


def test_rule_4_a_late_job_never_starts() -> None:
    jobs = order(job(1, deadline=5.0), job(2, deadline=6.0))
    assert jobs.next_deadline() == 5.0
    assert jobs.expired(5.0) == []
    assert jobs.expired(5.5) == [1]
    assert drained(jobs, 5.5) == [2]
    assert jobs.next_deadline() is None


def test_rule_5_only_so_many_jobs_wait_and_needed_ones_always() -> None:
    jobs = order(job(1), max_waiting=1)
    assert not jobs.add(job(2))
    assert jobs.add(job(3, needed=True))
    assert jobs.remove(1)
    assert not jobs.remove(1)
    assert drained(jobs, 0.0) == [3]


@pytest.mark.parametrize(
    ("waiting", "processors", "processes", "running", "threads"),
    [
        (1, 8, 2, 1, 4),
        (0, 8, 2, 2, 4),
        (0, 8, 2, 1, 8),
        (0, 8, 2, 0, 8),
        (0, 8, 3, 2, 4),
        (1, 2, 4, 1, 1),
    ],
)
def test_rule_6_processors_of_idle_processes_are_lent(
    waiting: int, processors: int, processes: int, running: int, threads: int
) -> None:
    jobs = order(*map(job, range(waiting)))
    assert jobs.threads(processors, processes, running) == threads

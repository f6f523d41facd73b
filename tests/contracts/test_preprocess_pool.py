"""What `PreprocessPool` promises: every job ends once, whatever its process does, and nothing is left of it."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.descriptors import nothing_left_open
from vllm_omni_sched.config.errors import (
    PreprocessCancelledError,
    PreprocessDeadlineError,
    PreprocessInputError,
    PreprocessProcessError,
    UnsupportedValueError,
)
from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, REALTIME
from vllm_omni_sched.preprocess import pool as pool_module
from vllm_omni_sched.preprocess.options import DEADLINE_SECONDS, MIB, PreprocessOptions
from vllm_omni_sched.preprocess.order import Outcome
from vllm_omni_sched.preprocess.pool import NullObserver, PreprocessPool

LONG = 60.0


class Events(NullObserver):
    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.restarts = 0

    def ended(self, outcome: Outcome, seconds: float) -> None:
        self.outcomes.append(outcome)

    def restarted(self) -> None:
        self.restarts += 1


def work(payload: Any, threads: Callable[[], int]) -> Any:
    """Do what the test says, in a process of the pool."""
    what, argument = payload
    if what == "double":
        return {"tensor": argument * 2}
    if what == "wait":  # until its file is there
        say_and_wait(argument)
        return "waited"
    if what == "threads":  # with how many threads it may run once that is another number than the given one
        while threads() == argument:
            select.select([], [], [], 0.001)
        return threads()
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "die_once":
        if not os.path.exists(argument):
            Path(argument).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()
    if what == "raise":
        raise {"value": ValueError, "memory": MemoryError, "other": KeyError}[argument]("why")
    if what == "object":
        return object()
    if what == "large":
        return torch.zeros(argument, dtype=torch.uint8)
    if what == "sockets":
        return [socket.socket(fileno=os.dup(argument)).family.name] if is_socket(argument) else []
    return os.getpid()


def is_socket(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")


def say_and_wait(path: str) -> None:
    with open(f"{path}.began", "w"):
        pass
    with open(path):  # a pipe, until somebody opens it for writing
        pass


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def pool(events: Events) -> Iterator[PreprocessPool]:
    with nothing_left_open():
        made = PreprocessPool(work, options(), observer=events)
        yield made
        made.close()
        assert not [pid for pid in made.pids if os.path.exists(f"/proc/{pid}")]
        assert made.held_bytes == 0


def options(**more: Any) -> PreprocessOptions:
    return PreprocessOptions(**{"processes": 2, "nice": 0, **more})


def blocked(pool: PreprocessPool, folder: Path, name: str) -> Any:
    """Return a job that runs until its pipe is opened."""
    os.mkfifo(folder / name)
    job = pool.submit(("wait", str(folder / name)))
    while not (folder / f"{name}.began").exists():
        select.select([], [], [], 0.005)
    return job


def unblock(folder: Path, name: str) -> None:
    os.close(os.open(folder / name, os.O_WRONLY))


def test_results_are_those_of_the_work(pool: PreprocessPool, events: Events) -> None:
    jobs = [pool.submit(("double", torch.arange(at))) for at in range(20)]
    assert [job.take()["tensor"].tolist() for job in jobs] == [[2 * i for i in range(at)] for at in range(20)]
    assert events.outcomes == [Outcome.DONE] * 20
    assert events.restarts == 0


def test_jobs_run_in_several_processes_at_a_time(pool: PreprocessPool, tmp_path: Path) -> None:
    jobs = [blocked(pool, tmp_path, name) for name in ("a", "b")]  # both have begun
    for name in ("b", "a"):
        unblock(tmp_path, name)
    assert [job.take() for job in jobs] == ["waited", "waited"]


def test_a_process_that_dies_is_replaced_and_its_job_runs_again(
    pool: PreprocessPool, events: Events, tmp_path: Path
) -> None:
    before = set(pool.pids)
    job = pool.submit(("die_once", str(tmp_path / "died")))
    assert job is not None
    assert job.take() in pool.pids
    assert events.outcomes == [Outcome.DONE]
    assert events.restarts == 1
    assert len(before & set(pool.pids)) == 1


def test_a_job_that_kills_two_processes_fails_alone(pool: PreprocessPool, events: Events) -> None:
    poison, others = pool.submit(("die", None)), [pool.submit(("double", torch.ones(1))) for _ in range(4)]
    with pytest.raises(PreprocessProcessError, match=r"two preprocessing processes died.*SIGKILL"):
        poison.take()  # type: ignore[union-attr]
    assert [job.take()["tensor"].item() for job in others] == [2.0] * 4  # type: ignore[union-attr]
    assert events.restarts == 2
    assert sorted(events.outcomes, key=str) == [Outcome.DIED, *[Outcome.DONE] * 4]


def test_a_process_killed_while_idle_is_replaced(pool: PreprocessPool) -> None:
    pool.submit(("pid", None)).take()  # type: ignore[union-attr]
    for pid in pool.pids:
        end = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([end], [], [], LONG)[0]
        os.close(end)
    assert pool.submit(("double", torch.ones(1))).take()["tensor"].item() == 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("what", "argument", "error", "outcome"),
    [
        ("raise", "value", PreprocessInputError, Outcome.BAD_INPUT),
        ("raise", "memory", PreprocessProcessError, Outcome.MEMORY),
        ("raise", "other", PreprocessProcessError, Outcome.FAILED),
        ("object", None, UnsupportedValueError, Outcome.UNSUPPORTED),
    ],
)
def test_what_the_work_raises_fails_its_job(
    pool: PreprocessPool, events: Events, what: str, argument: Any, error: type[Exception], outcome: Outcome
) -> None:
    with pytest.raises(error):
        pool.submit((what, argument)).take()  # type: ignore[union-attr]
    assert events.outcomes == [outcome]
    assert events.restarts == 0


def test_a_waiting_job_can_be_cancelled(pool: PreprocessPool, events: Events, tmp_path: Path) -> None:
    running = [blocked(pool, tmp_path, name) for name in ("a", "b")]
    waiting = pool.submit(("die", None))
    assert waiting is not None
    waiting.cancel()
    with pytest.raises(PreprocessCancelledError):
        waiting.take()
    for name in ("a", "b"):
        unblock(tmp_path, name)
    assert [job.take() for job in running] == ["waited", "waited"]
    assert events.restarts == 0


def test_a_running_job_is_cancelled_with_its_process(pool: PreprocessPool, events: Events, tmp_path: Path) -> None:
    job = blocked(pool, tmp_path, "a")
    job.cancel()
    with pytest.raises(PreprocessCancelledError):
        job.take()
    assert events.outcomes == [Outcome.CANCELLED]
    assert events.restarts == 1
    assert pool.submit(("double", torch.ones(1))).take()["tensor"].item() == 2  # type: ignore[union-attr]


def test_deadlines_are_those_of_the_class(tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEADLINE_SECONDS, "realtime", 1.0)
    monkeypatch.setitem(DEADLINE_SECONDS, "interactive", 5.0)
    now = [0.0]
    pool = PreprocessPool(
        work,
        options(processes=1),
        clock=lambda: now[0],
        observer=events,
    )
    running = blocked(pool, tmp_path, "a")
    waiting = {sla: pool.submit(("pid", None), sla) for sla in (REALTIME, INTERACTIVE, BATCH)}
    now[0] = 2.0
    running.cancel()
    for sla, error in ((REALTIME, PreprocessDeadlineError), (INTERACTIVE, None), (BATCH, None)):
        job = waiting[sla]
        assert job is not None
        if error is None:
            assert isinstance(job.take(), int)
        else:
            with pytest.raises(error, match="class realtime were not preprocessed within 1 s"):
                job.take()
    pool.close()


def test_a_result_beyond_the_memory_is_refused(events: Events) -> None:
    pool = PreprocessPool(work, options(processes=1, max_bytes=MIB), observer=events)
    with pytest.raises(PreprocessProcessError, match="max_bytes"):
        pool.submit(("large", 2 * MIB)).take()  # type: ignore[union-attr]
    assert pool.submit(("large", MIB)).take().numel() == MIB  # type: ignore[union-attr]
    pool.close()


def test_results_that_nobody_takes_stop_further_ones_but_not_needed_ones(events: Events) -> None:
    pool = PreprocessPool(work, options(processes=1, max_bytes=MIB), observer=events)
    held = pool.submit(("large", MIB))
    assert held is not None
    held.future.result()
    waits, needed = pool.submit(("large", 10)), pool.submit(("large", 20), needed=True)
    assert needed is not None
    assert waits is not None
    assert needed.take().numel() == 20
    assert not waits.future.done()
    assert held.take().numel() == MIB
    assert waits.take().numel() == 10
    pool.close()


def test_too_many_waiting_jobs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MOST_WAITING", 1)
    pool = PreprocessPool(work, options(processes=1))
    job = blocked(pool, tmp_path, "a")
    assert pool.submit(("pid", None)) is not None
    assert pool.submit(("pid", None)) is None
    job.cancel()
    pool.close()


def test_closing_ends_every_job(tmp_path: Path, events: Events) -> None:
    with nothing_left_open():
        pool = PreprocessPool(work, options(processes=1), observer=events)
        running, waiting = blocked(pool, tmp_path, "a"), pool.submit(("pid", None))
        pool.close()
        for job in (running, waiting):
            with pytest.raises(PreprocessProcessError, match="closed"):
                job.take()  # type: ignore[union-attr]
        with pytest.raises(PreprocessProcessError, match="closed"):
            pool.submit(("pid", None))
        assert events.outcomes == [Outcome.CLOSED, Outcome.CLOSED]
        del running, waiting, job, pool


def test_processes_end_with_their_owner() -> None:
    receiving, sending = os.pipe()
    owner = os.fork()
    if owner == 0:
        try:
            pool = PreprocessPool(work, options())
            os.write(sending, " ".join(map(str, pool.pids)).encode())
            threading.Event().wait()
        finally:
            os._exit(1)
    os.close(sending)
    pids = [os.pidfd_open(int(pid)) for pid in os.read(receiving, 200).split()]
    os.close(receiving)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    for pid in pids:
        assert select.select([pid], [], [], LONG)[0]
        os.close(pid)


def test_a_running_job_that_is_late_is_ended(tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEADLINE_SECONDS, "interactive", 2.0)
    pool = PreprocessPool(work, options(processes=1), observer=events)
    job = blocked(pool, tmp_path, "a")  # begins in time on a busy machine as well
    with pytest.raises(PreprocessDeadlineError):
        job.take()
    assert events.restarts == 1
    pool.close()


def test_the_sockets_of_the_server_are_not_kept_open() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        pool = PreprocessPool(work, options(processes=1))
        assert pool.submit(("sockets", listening.fileno())).take() == []  # type: ignore[union-attr]
        pool.close()

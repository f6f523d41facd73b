"""The file of the journal of faults: bounded, private, durable, and never in the way; and what a pipeline writes."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import FINAL, Rig, StageSpec
from vllm_omni_sched import bounded_log
from vllm_omni_sched.bounded_log import BoundedLog
from vllm_omni_sched.monitor.journal.fault import Fault, fault_of

pytestmark = pytest.mark.omni

TWO = StageSpec(replicas=2, final_output=True)
Open = Callable[..., BoundedLog]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "faults.jsonl"


@pytest.fixture
def opened(path: Path) -> Iterator[Open]:
    logs = []

    def make(max_bytes: int = 1 << 20) -> BoundedLog:
        logs.append(BoundedLog(path, max_bytes, "journal", lambda count: b"lost %d\n" % count))
        return logs[-1]

    yield make
    for log in logs:
        log.close()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_lines_survive_restarts_in_a_file_of_this_user_alone(path: Path, opened: Open) -> None:
    before = os.umask(0)
    try:
        for line in (b"one\n", b"two\n"):
            log = opened()
            log.write(line)
            log.close()
    finally:
        os.umask(before)
    assert lines(path) == ["one", "two"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_both_files_together_are_bounded_and_the_newest_lines_stay(path: Path, opened: Open) -> None:
    log = opened(1000)
    for number in range(200):
        log.write(b"%09d\n" % number)
    log.close()
    previous = path.with_name("faults.jsonl.1")
    assert path.stat().st_size + previous.stat().st_size <= 1000
    kept = [int(line) for line in lines(previous) + lines(path)]
    assert kept == list(range(kept[0], 200))
    assert len(kept) >= 50
    assert stat.S_IMODE(previous.stat().st_mode) == 0o600


def test_a_line_that_was_cut_off_spoils_no_other(path: Path, opened: Open) -> None:
    path.write_text('{"whole": 1}\n{"cut')
    log = opened()
    log.write(b"next\n")
    log.close()
    assert lines(path) == ['{"whole": 1}', '{"cut', "next"]


def test_a_full_disk_is_one_warning_and_what_was_lost_is_counted(
    path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(bounded_log.logger, "warning", lambda text, *values: said.append(text % values))
    full, write, tried = [True], os.write, threading.Semaphore(0)

    def writes(file: int, line: bytes) -> int:
        tried.release()
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, line)

    monkeypatch.setattr(bounded_log.os, "write", writes)
    log = opened()
    for number in range(3):
        log.write(b"lost %d\n" % number)
    for _ in range(3):
        tried.acquire(timeout=60)
    full[0] = False
    log.write(b"kept\n")
    log.close()
    assert lines(path) == ["lost 3", "kept"]
    assert [text.replace(str(path), "FILE") for text in said] == [
        "the journal FILE cannot be written (No space left on device); entries are dropped until it can",
        "the journal FILE is written again; 3 entries were dropped",
    ]


def test_a_half_written_line_is_taken_back(path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    write, lengths = os.write, iter([3])

    def writes(file: int, line: bytes) -> int:
        return write(file, line[: next(lengths, None)])

    monkeypatch.setattr(bounded_log.os, "write", writes)
    log = opened()
    log.write(b"cut off\n")
    log.write(b"whole\n")
    log.close()
    assert lines(path) == ["lost 1", "whole"]


@pytest.mark.parametrize("what", ["link", "directory", "fifo", "locked"])
def test_what_is_not_ours_to_write_is_left_alone(path: Path, opened: Open, what: str) -> None:
    target = path.with_name("target")
    target.write_text("theirs\n")
    file = None
    if what == "link":
        path.symlink_to(target)
    elif what == "directory":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.write_text("theirs\n")
        file = path.open()
        fcntl.flock(file, fcntl.LOCK_EX)
    log = opened()
    log.write(b"ours\n")
    log.close()
    assert target.read_text() == "theirs\n"
    if file is not None:
        assert file.read() == "theirs\n"
        file.close()


# ---- of a pipeline


def entries(path: Path) -> list[Fault]:
    return [fault_of(line) for line in path.read_bytes().splitlines()]


def journal(path: Path, **more: Any) -> dict[str, Any]:
    return {"monitoring": {"journal": {"path": str(path)}}, **more}


@pytest.mark.asyncio
async def test_a_death_is_told_with_what_was_done(path: Path) -> None:
    async with Rig(TWO, **journal(path)) as rig:
        for number in range(4):
            await rig.ask(f"r{number}", (number,))
        lost = sum(rig.replica_id(0, f"r{number}") == 0 for number in range(4))
        await rig.kill(0, 0)
        await rig.finish(0, *rig.at(0))
    found = entries(path)
    kinds = [one.kind for one in found]
    assert (kinds[0], kinds[-1]) == ("started", "stopped")
    assert {"suspected", "died", "restarting", "back"} <= set(kinds)
    (died,) = [one for one in found if one.kind == "died"]
    assert (died.stage, died.replica, died.requests) == (0, 0, lost)
    assert died.seconds is not None
    again = [one for one in found if one.kind == "redispatched"]
    assert sum(one.requests for one in again) == lost
    assert {one.replica for one in again} == {1}
    (back,) = [one for one in found if one.kind == "back"]
    assert (back.replica, back.requests) == (0, lost)


@pytest.mark.asyncio
async def test_requests_that_stall_and_anomalies_are_told(path: Path) -> None:
    anomaly = {"max_stage_seconds": 5.0}
    recovery = {"hang_seconds": None, "max_wait_seconds": 1.0}
    options = {
        "runtime": {"stall_seconds": 20.0, "recovery": recovery},
        "monitoring": {"anomaly": anomaly, "journal": {"path": str(path)}},
    }
    async with Rig(FINAL, **options) as rig:
        await rig.ask("a")
        for _ in range(5):
            await rig.tick(6.0)
    found = {one.kind: one for one in entries(path)}
    assert {"stage_timeout", "stuck_queue", "failed"} <= found.keys()
    assert found["stage_timeout"].request_id == "a"
    assert "stalled" in found["failed"].cause


@pytest.mark.asyncio
async def test_a_pipeline_goes_on_without_a_place_for_its_journal(tmp_path: Path) -> None:
    async with Rig(TWO, **journal(tmp_path / "missing" / "faults.jsonl")) as rig:
        await rig.ask("a")
        await rig.kill(0, rig.replica_id(0, "a"))
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected()

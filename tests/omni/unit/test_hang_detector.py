"""A replica whose process lives, and from which nothing comes, is ended, and its requests run elsewhere, once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import Rig, StageSpec, engine_output
from vllm_omni_sched.core.pipeline.hangs import ReplicaHangs
from vllm_omni_sched.logs import LOGGER
from vllm_omni_sched.omni.stages.reports import processes

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

TWO = StageSpec(replicas=2, final_output=True)
LONG = tuple(range(64))


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives, and does nothing."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were killed; nothing else may be."""
    killed: list[int] = []
    monkeypatch.setattr(processes, "kill", lambda found: killed.extend(one.pid for one in found))
    return killed


async def stopped(pid: int) -> None:
    """Wait until the kernel has stopped a process."""
    for _ in range(1000):
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return
        await asyncio.sleep(0.005)
    pytest.fail(f"process {pid} was not stopped")


def hanging(rig: Rig, stage_id: int, replica_id: int, process: Any) -> None:
    """The replica's process is this one, and it says nothing unless told to."""
    rig.replica(stage_id, replica_id).resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))


def watch(rig: Rig) -> ReplicaHangs:
    assert rig.omni.hang_detector.hangs is not None
    return rig.omni.hang_detector.hangs


async def seconds(rig: Rig, count: int, each: float = 1.0) -> None:
    for _ in range(count):
        rig.now += each
        rig.omni.hang_detector.check(rig.now)
        watch(rig).validate()
        await rig.omni.release()
        await rig.turn()


async def learned(rig: Rig, stage_id: int = 0) -> None:
    """A stage that has spoken often enough for its silences to be known."""
    watch(rig).silence.least_samples = 4
    for i in range(6):
        await rig.ask(f"before {i}", (i,))
        await seconds(rig, 1)
        for stage in range(stage_id + 1):
            await rig.finish(stage, f"before {i}")


def counted(rig: Rig, stage_id: int = 0) -> int:
    return rig.driver.board.stages[stage_id].anomalies["silent_replica"]


def incidents(rig: Rig, replica: tuple[int, int]) -> dict[str, int]:
    return {kind: count for kind, count in rig.driver.board.replicas[replica].incidents.items() if count}


def hang_after(hang: float | None, **recovery: Any) -> dict[str, Any]:
    return {"runtime": {"recovery": {"hang_seconds": hang, **recovery}}}


async def suspected(rig: Rig, process: Any) -> int:
    """Two requests run, one each; the replica of the second hangs."""
    for replica_id in (0, 1):
        hanging(rig, 0, replica_id, process)
    await learned(rig)
    await rig.ask("a", LONG)
    await rig.ask("b", LONG[1:])
    hangs = rig.replica_id(0, "b")
    assert rig.replica_id(0, "a") != hangs
    for _ in range(8):
        await rig.step(0, "a")
        await seconds(rig, 1)
    return hangs


async def test_one_that_hangs_gets_nothing_new_and_is_then_ended(sleeping: Any, ended: list[int]) -> None:
    async with Rig(TWO, **hang_after(5.0)) as rig:
        hangs = await suspected(rig, sleeping)
        assert counted(rig) == 1
        assert incidents(rig, (0, hangs)) == {"suspected": 1}
        for name in ("c", "d"):
            await rig.ask(name, (1, 2, ord(name)))
            assert rig.replica_id(0, name) == 1 - hangs
        for _ in range(5):
            assert ended == []
            await rig.step(0, "a")
            await seconds(rig, 1)
            if ended:
                break
        assert ended == [sleeping.pid]
        await rig.kill(0, hangs)
        for name in ("a", "b", "c", "d"):
            await rig.finish(0, name)
        assert rig.answer("a") == engine_output(0, LONG)
        assert rig.answer("b") == engine_output(0, LONG[1:])
        assert rig.runtime.started == [(0, hangs)]
        assert incidents(rig, (0, hangs)) == {"suspected": 1, "died": 1, "restarting": 1, "back": 1}
        await seconds(rig, 3)
        assert rig.omni.stage_pools[0].suspected == set()


async def test_one_that_speaks_again_is_as_before(
    sleeping: Any, ended: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(TWO, **hang_after(5.0)) as rig:
        hangs = await suspected(rig, sleeping)
        with caplog.at_level("WARNING", logger=LOGGER):
            await rig.step(0, "b")
            await seconds(rig, 1)
        assert "no longer hangs" in caplog.text
        assert incidents(rig, (0, hangs)) == {"suspected": 1, "cleared": 1}
        assert rig.omni.stage_pools[0].suspected == set()
        for _ in range(10):
            await rig.step(0, "a", "b")
            await seconds(rig, 1)
        assert ended == []


async def test_without_recovery_nothing_is_ended(sleeping: Any, ended: list[int]) -> None:
    async with Rig(TWO, **hang_after(1.0, enabled=False)) as rig:
        await suspected(rig, sleeping)
        await seconds(rig, 20)
        assert (counted(rig), ended) == (2, [])


@pytest.mark.parametrize("async_chunk", [True, False])
async def test_a_stopped_one_that_may_not_have_sent_its_last_output_hangs(
    sleeping: Any, ended: list[int], async_chunk: bool
) -> None:
    second = StageSpec(replicas=2, final_output=True, edge=True)
    async with Rig(StageSpec(), second, async_chunk=async_chunk, **hang_after(5.0)) as rig:
        hanging(rig, 0, 0, sleeping)
        await learned(rig, 1)
        await rig.ask("a", LONG)
        await rig.finish(0, "a")
        await seconds(rig, 20, each=20.0)
        assert (counted(rig), ended) == (0, [])  # it has nothing to do, and lives
        sleeping.send_signal(signal.SIGSTOP)
        await stopped(sleeping.pid)
        await seconds(rig, 20, each=20.0)
        assert (counted(rig), ended) == (1, [sleeping.pid])
        assert incidents(rig, (0, 0))["suspected"] == 1


async def test_vllm_omni_is_told_if_it_does_not_notice(
    sleeping: Any, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni_sched.omni.stages.recovery.hang_detector.NOTICED_SECONDS", 0.0)
    async with Rig(TWO, **hang_after(1.0)) as rig:
        hangs = await suspected(rig, sleeping)
        await rig.settle()
        assert ended == [sleeping.pid]
        assert incidents(rig, (0, hangs))["died"] == 1
        await rig.finish(0, "b")
        assert rig.answer("b") == engine_output(0, LONG[1:])


async def test_a_replica_that_is_back_can_hang_again(
    sleeping: Any, ended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni_sched.omni.stages.recovery.hang_detector.NOTICED_SECONDS", 0.0)
    async with Rig(TWO, **hang_after(1.0)) as rig:
        hangs = await suspected(rig, sleeping)
        for _ in range(8):
            if not ended:
                await rig.step(0, "a")
                await seconds(rig, 1)
        await rig.settle()
        assert incidents(rig, (0, hangs))["back"] == 1
        assert ended == [sleeping.pid]
        ended.clear()
        hanging(rig, 0, hangs, sleeping)
        await rig.ask("c", LONG[2:])
        await rig.ask("d", LONG[3:])
        assert any(rig.replica_id(0, name) == hangs for name in "abcd")
        for _ in range(40):
            if not ended:
                await rig.step(0, *[name for name in "abcd" if rig.replica_id(0, name) == 1 - hangs])
                await seconds(rig, 1)
        assert ended == [sleeping.pid]

"""What is ill in the stages is told, once."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import FINAL, Rig, StageSpec
from vllm_omni_sched.engine.metrics.files import EngineDirectory
from vllm_omni_sched.logs import LOGGER
from vllm_omni_sched.omni.stages.reports import report_reader
from vllm_omni_sched.omni.stages.reports.stage_monitor import MEMORY_SECONDS

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

NOBODY = 2**22 + 12345  # a process id beyond what Linux gives


def anomaly(**how: Any) -> dict[str, Any]:
    return {"monitoring": {"anomaly": {"max_stage_seconds": 10.0, **how}}}


def counted(rig: Rig, stage_id: int = 0) -> dict[str, int]:
    return {kind: count for kind, count in rig.driver.board.stages[stage_id].anomalies.items() if count}


async def test_a_request_that_hangs_is_told_once_while_it_does(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig(FINAL, **anomaly()) as rig:
        await rig.ask("a")
        await rig.tick(9.0)
        assert counted(rig) == {}
        with caplog.at_level("WARNING", logger=LOGGER):
            for _ in range(3):
                await rig.tick(2.0)
        assert counted(rig) == {"stage_timeout": 1}
        told = [record.getMessage() for record in caplog.records if "stage_timeout" in record.getMessage()]
        assert len(told) == 1
        assert "request a" in told[0]
        assert "stage0 (0)" in told[0]


async def test_a_queue_that_stands_is_stuck() -> None:
    async with Rig(StageSpec(final_output=True, max_num_seqs=1), **anomaly()) as rig:
        for i in range(2):
            await rig.ask(f"{i}", (i,))
        await rig.tick(1.0)
        await rig.tick(11.0)
        assert counted(rig) == {"stage_timeout": 1, "stuck_queue": 1}


async def test_switched_off_nothing_is_looked_for() -> None:
    async with Rig(FINAL, **anomaly(enabled=False)) as rig:
        await rig.ask("a")
        await rig.tick(20.0)
        assert counted(rig) == {}


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where reports of stages lie."""
    monkeypatch.setattr(report_reader, "reports_base", lambda: tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def other_process() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


def run_by(rig: Rig, stage_id: int, *pids: int) -> None:
    """The first replica of a stage is these processes."""
    processes = [SimpleNamespace(pid=pid) for pid in pids]
    rig.replica(stage_id).resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=processes))


class Sender:
    """A replica of the first stage, which puts messages to the second and says so; its process is this one."""

    def __init__(self, rig: Rig, base: Path) -> None:
        self._rig, self._base = rig, base
        self._sums: list[float] = [0, 0, 0.0, 0]
        run_by(rig, 0, os.getpid())

    async def reports(self, well: int = 0, failed: int = 0, seconds: float = 0.001) -> None:
        """So much more, in ``seconds`` each, and somebody looks."""
        self._sums = [a + b for a, b in zip(self._sums, (well, 100 * well, well * seconds, failed), strict=True)]
        body: dict[str, Any] = {"processes": [f"{os.getpid()}@1"], "caches": {}, "device_bytes": None}
        directory = EngineDirectory.create("report", {}, self._base)
        try:
            directory.write(json.dumps(body | {"edges": {"0>1 put": self._sums}}).encode())
            await self._rig.tick(MEMORY_SECONDS)
        finally:
            directory.close()


async def test_an_edge_that_fails_counts_for_the_stage_where_it_ends(
    base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Rig(StageSpec(), FINAL, **anomaly()) as rig:
        sender = Sender(rig, base)
        await sender.reports(well=100)
        assert counted(rig, 1) == {}
        with caplog.at_level("WARNING", logger=LOGGER):
            for _ in range(2):
                await sender.reports(well=50, failed=50)
        told = [record.getMessage().partition(" (")[0] for record in caplog.records]
        assert told == ["0->1 put by replica 0: sick_edge_errors"]
        assert (counted(rig, 0), counted(rig, 1)) == ({}, {"sick_edge_errors": 1})
        await sender.reports(well=100)
        await sender.reports(failed=100)
        assert counted(rig, 1) == {"sick_edge_errors": 2}


async def test_one_that_slows_down_is_sick_and_one_that_moves_more_is_not(base: Path) -> None:
    async with Rig(StageSpec(), FINAL, **anomaly()) as rig:
        sender = Sender(rig, base)
        for i in range(40):
            await sender.reports(well=1 + i % 7)
        for _ in range(20):
            await sender.reports(well=70)
        assert counted(rig, 1) == {}
        for _ in range(20):
            await sender.reports(well=5, seconds=0.01)
        assert counted(rig, 1) == {"sick_edge_latency": 1}


@pytest.mark.parametrize(("stage_id", "another"), [(0, True), (1, True), (2, False)])
@pytest.mark.parametrize("back", [True, False])
async def test_an_edge_of_which_an_end_has_gone_is_another_one(
    base: Path, other_process: int, stage_id: int, another: bool, back: bool
) -> None:
    """It is found to be sick a second time only if it was taken for healthy in between."""
    async with Rig(StageSpec(), StageSpec(), FINAL, **anomaly()) as rig:
        sender = Sender(rig, base)
        pid = os.getpid() if stage_id == 0 else other_process
        run_by(rig, stage_id, pid)
        await sender.reports(well=50, failed=50)
        assert counted(rig, 1) == {"sick_edge_errors": 1}
        run_by(rig, stage_id, *((pid, NOBODY) if back else ()))
        await sender.reports()
        run_by(rig, 0, *((pid, NOBODY) if back and stage_id == 0 else (os.getpid(),)))
        await sender.reports(well=10)
        await sender.reports(well=10, failed=50)
        assert counted(rig, 1) == {"sick_edge_errors": 1 + another}


async def test_what_is_sent_on_is_noted_and_says_nothing_of_the_edge() -> None:
    async with Rig(StageSpec(), FINAL, **anomaly()) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        noted = rig.driver.board.edges[0, 1].transfer_seconds
        assert sum(noted.counts) == 1
        for i in range(200):
            rig.driver.monitor.sent(0, 1, 0.001 if i < 100 else 10.0)
        await rig.tick(2.0)
        assert sum(noted.counts) == 201
        assert noted.total > 1000.0
        assert counted(rig, 1) == {}


async def test_the_memory_of_a_replica_is_that_of_its_processes() -> None:
    async with Rig(FINAL) as rig:
        processes = [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=NOBODY), SimpleNamespace(pid=None)]
        rig.replica(0).resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=processes))
        await rig.tick(1.0)
        held = rig.driver.board.replicas[0, 0].host_bytes
        assert held is not None
        assert held > 1 << 20

"""What is ill in the stages is told, once."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import FINAL, Rig, StageSpec

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]


def anomaly(**how: Any) -> dict[str, Any]:
    return {"monitoring": {"anomaly": {"max_stage_seconds": 10.0, **how}}}


def counted(rig: Rig, stage_id: int = 0) -> dict[str, int]:
    return {kind: count for kind, count in rig.policies.board.stages[stage_id].anomalies.items() if count}


async def test_a_request_that_hangs_is_told_once_while_it_does(caplog: pytest.LogCaptureFixture) -> None:
    async with Rig(FINAL, **anomaly()) as rig:
        await rig.ask("a")
        await rig.tick(9.0)
        assert counted(rig) == {}
        with caplog.at_level("WARNING", logger="vllm_omni_sched"):
            for _ in range(3):
                await rig.tick(2.0)
        assert counted(rig) == {"stage_timeout": 1}
        told = [record.getMessage() for record in caplog.records if "stage_timeout" in record.getMessage()]
        assert len(told) == 1
        assert "request a" in told[0]
        assert "stage0 (0)" in told[0]


async def test_and_again_when_it_happens_again() -> None:
    async with Rig(FINAL, **anomaly()) as rig:
        for i in range(2):
            await rig.ask(f"{i}", (i,))
            await rig.tick(11.0)
            await rig.tick(2.0)
            await rig.finish(0, f"{i}")
            await rig.tick(2.0)
        assert counted(rig) == {"stage_timeout": 2}


async def test_a_queue_that_stands_is_stuck() -> None:
    async with Rig(StageSpec(final_output=True, max_num_seqs=1), **anomaly()) as rig:
        for i in range(2):
            await rig.ask(f"{i}", (i,))
        await rig.tick(1.0)
        await rig.tick(11.0)
        assert counted(rig) == {"stage_timeout": 1, "stuck_queue": 1}


async def test_a_queue_that_moves_is_not_stuck() -> None:
    async with Rig(StageSpec(final_output=True, max_num_seqs=1), **anomaly()) as rig:
        for i in range(5):
            await rig.ask(f"{i}", (i,))
        for i in range(5):
            await rig.tick(6.0)
            await rig.finish(0, f"{i}")
        assert counted(rig) == {}


async def test_an_aborted_request_hangs_no_more() -> None:
    async with Rig(FINAL, **anomaly()) as rig:
        await rig.ask("a")
        await rig.abort("a")
        await rig.tick(20.0)
        await rig.tick(20.0)
        assert counted(rig) == {}


async def test_switched_off_nothing_is_looked_for() -> None:
    async with Rig(FINAL, **anomaly(enabled=False)) as rig:
        await rig.ask("a")
        await rig.tick(20.0)
        assert counted(rig) == {}


async def test_it_looks_no_more_often_than_it_should() -> None:
    async with Rig(FINAL, **anomaly(interval_seconds=5.0)) as rig:
        pools = rig.omni.stage_pools
        await rig.ask("a")
        rig.policies.watch.look(pools, 1000.0)
        assert rig.policies.watch.look(pools, 1004.0) == ()
        rig.policies.watch.look(pools, 1005.0)
        assert rig.policies.watch.look(pools, 1009.0) == ()
        assert rig.policies.watch.look(pools, 1030.0)


async def test_an_edge_that_fails_counts_for_the_stage_where_it_ends() -> None:
    async with Rig(StageSpec(), FINAL, **anomaly()) as rig:
        for i in range(64):
            rig.policies.watch.sent(0, 1, 0.001, 1000.0 + i, ok=i % 2 == 0)
        await rig.tick(100.0)
        assert counted(rig, 1) == {"sick_edge_errors": 1}
        assert counted(rig, 0) == {}


async def test_what_is_sent_on_is_noted() -> None:
    async with Rig(StageSpec(), FINAL) as rig:
        await rig.ask("a")
        await rig.finish(0, "a")
        assert list(rig.policies.watch._edge._edges) == ["0->1"]


async def test_the_memory_of_a_replica_is_that_of_its_processes() -> None:
    async with Rig(FINAL) as rig:
        none = 2**22 + 12345  # beyond what Linux gives
        processes = [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=none), SimpleNamespace(pid=None)]
        rig.replica(0).resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=processes))
        await rig.tick(1.0)
        held = rig.policies.board.replicas[0, 0].host_bytes
        assert held is not None
        assert held > 1 << 20

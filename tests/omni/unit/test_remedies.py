"""Replicas with an anomaly are replaced by the machinery of moves and of recovery, and no request is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_moves import MovingRig
from tests.support.omni_stages import StageSpec
from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.monitor.journal.fault import fault_of
from vllm_omni_sched.monitor.recovery.events import Replica

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

TWO, ONE = StageSpec(replicas=2, final_output=True), StageSpec(final_output=True)


def acting(*act_on: str, journal: Path | None = None, **recovery: Any) -> dict[str, Any]:
    return {
        "runtime": {"recovery": {"act_on": list(act_on), "hang_seconds": None, **recovery}, "drain_seconds": 20.0},
        "monitoring": {
            "anomaly": {"max_stage_seconds": 10.0},
            "journal": {"path": None if journal is None else str(journal)},
        },
    }


async def leaks(rig: MovingRig, replica: Replica) -> None:
    """Do what `StageMonitor` does when it finds a leak."""
    name = f"stage{replica.stage} replica {replica.index}"
    rig.driver._found(replica.stage, replica, Anomaly(AnomalyKind.MEMORY_LEAK, name, rig.now, {}), rig.now)
    await rig.settle()


async def test_a_replica_that_leaks_is_replaced_when_it_is_empty() -> None:
    async with MovingRig(TWO, **acting("leak")) as rig:
        for name in "ab":
            await rig.ask(name, (ord(name),))
        where = rig.replica_id(0, "a")
        old = rig.replica(0, where)
        await leaks(rig, Replica(0, where))
        await rig.ask("c", (3,))
        assert rig.replica_id(0, "c") != where  # it gets nothing new
        assert not old.down
        await rig.finish_all()
        await rig.tick(1.0)
        assert old.down
        assert rig.replica(0, where) is not old
        assert rig.live() == [[0, 1]]
        assert rig.incidents(0, where) == {"replacing": 1, "draining": 1, "moved_away": 1, "moved_in": 1}
        for name, token in (("a", ord("a")), ("b", ord("b")), ("c", 3)):
            assert rig.answer(name) == rig.expected((token,))
        assert not rig.left_over()


async def test_the_last_replica_of_a_stage_goes_when_another_one_is_there() -> None:
    async with MovingRig(ONE, **acting("leak")) as rig:
        old = rig.replica(0)
        await leaks(rig, Replica(0, 0))
        await rig.tick(1.0)
        assert old.down
        assert rig.live() == [[1]]


async def test_a_replica_on_which_a_request_hangs_is_ended_and_its_requests_run_elsewhere(tmp_path: Path) -> None:
    journal = tmp_path / "faults.jsonl"
    async with MovingRig(TWO, **acting("timeout", journal=journal)) as rig:
        ended: list[int] = []

        def terminate(pool: Any, replica_id: int) -> None:
            ended.append(replica_id)
            pool.clients[replica_id].dead = True

        rig.omni.hang_detector.terminate = terminate  # type: ignore[method-assign]
        await rig.ask("a")
        where = rig.replica_id(0, "a")
        for _ in range(4):
            await rig.tick(11.0)
        assert ended == [where]
        await rig.settle()
        assert rig.replica_id(0, "a") == 1 - where
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected()
        assert not rig.left_over()
    told = [fault_of(line) for line in journal.read_bytes().splitlines()]
    kinds = [one.kind for one in told]
    order = ["stage_timeout", "replacing", "draining", "stayed", "terminating", "died", "redispatched"]
    assert [kind for kind in kinds if kind in order and kind != "stuck_queue"] == order
    assert {one.cause for one in told if one.kind == "terminating"} == {"timeout, not_empty"}


async def test_by_default_an_anomaly_is_only_told() -> None:
    async with MovingRig(TWO) as rig:
        old = rig.replica(0, 1)
        await leaks(rig, Replica(0, 1))
        await rig.tick(1.0)
        assert rig.replica(0, 1) is old
        assert (0, 1) not in rig.driver.board.replicas

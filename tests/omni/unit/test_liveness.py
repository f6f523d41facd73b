"""A replica whose process has ended is found dead, though vLLM-Omni says nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import FINAL, Rig, StageSpec

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

TWO = StageSpec(replicas=2, final_output=True)


class Process:
    """A process, as the engine's manager has it; ``looks``: how often it was asked."""

    name, exitcode = "EngineCore", -9

    def __init__(self) -> None:
        self.alive, self.looks = True, 0

    def is_alive(self) -> bool:
        self.looks += 1
        return self.alive


def process_of(rig: Rig, replica_id: int = 0, *, diffusion: bool = False) -> Process:
    process, replica = Process(), rig.replica(0, replica_id)
    if diffusion:
        replica._proc_manager = SimpleNamespace(proc=process)
    else:
        replica.resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
    return process


async def check(rig: Rig, seconds: float) -> None:
    rig.now += seconds
    await rig.omni.liveness.check(rig.omni.stage_pools, rig.now)
    await rig.settle()


def incidents(rig: Rig) -> dict[str, Any]:
    board = rig.driver.board
    return {kind: count for one in board.replicas.values() for kind, count in one.incidents.items() if count}


@pytest.mark.parametrize("diffusion", [False, True])
async def test_what_it_had_goes_to_another_replica(diffusion: bool) -> None:
    async with Rig(TWO) as rig:
        process = process_of(rig, diffusion=diffusion)
        await rig.ask("a")
        rig.runtime.go.clear()
        await check(rig, 1.0)
        assert rig.replica_id(0, "a") == 0
        process.alive = False
        await check(rig, 1.0)
        assert rig.replica_id(0, "a") == 1
        await rig.finish(0, "a")
        assert rig.answer("a") == rig.expected()


async def test_it_dies_once_whoever_notices_it() -> None:
    async with Rig(TWO) as rig:
        process, replica = process_of(rig), rig.replica(0)
        rig.runtime.go.clear()
        process.alive = False
        replica.dead = True  # vLLM-Omni sees that
        await check(rig, 1.0)
        await check(rig, 1.0)
        assert incidents(rig)["died"] == 1
        rig.runtime.go.set()
        await rig.settle()
        assert rig.runtime.started == [(0, 0)]
        assert rig.replica(0) is not replica


async def test_a_replica_whose_processes_are_elsewhere_is_not_ours_to_judge() -> None:
    async with Rig(FINAL) as rig:
        rig.replica(0).resources = SimpleNamespace(engine_manager=None)
        await check(rig, 1.0)
        assert rig.omni.stage_pools[0].live_replica_ids() == [0]

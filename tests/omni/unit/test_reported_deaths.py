"""A death leads to one start of the replica, whoever reports it, in whatever order and how often."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.engine.exceptions import EngineDeadError

from tests.support.omni_stages import FINAL, Rig, Runtime, StageSpec

pytestmark = [pytest.mark.omni]

OPTIONS = {"runtime": {"recovery": {"max_restarts": 999, "max_redispatches": 999}}}
REPLICAS = 2


class OneAtATime(Runtime):
    """Runtime that notes if a replica is started that serves, or of which another start is under way."""

    under_way: set[int]
    wrong: list[str]
    pool: Any

    def _initialize_replica(self, plan: Any, timeout: float) -> Any:
        if plan.replica_id in self.under_way:
            self.wrong.append(f"{plan.replica_id} is started twice at a time")
        if self.pool.clients[plan.replica_id] is not None:
            self.wrong.append(f"{plan.replica_id} is started, and serves")
        self.under_way.add(plan.replica_id)
        try:
            return super()._initialize_replica(plan, timeout)
        finally:
            self.under_way.discard(plan.replica_id)


class ReportingRig(Rig):
    """Rig whose replicas die, and whose deaths are reported by all that may notice them."""

    async def __aenter__(self) -> ReportingRig:
        await super().__aenter__()
        runtime: Any = self.runtime
        runtime.__class__ = OneAtATime
        runtime.under_way, runtime.wrong, runtime.pool = set(), [], self.omni.stage_pools[0]
        self.pool = self.omni.stage_pools[0]
        self.dead: list[tuple[int, Any]] = []
        self.asked = self.failed = 0
        return self

    def die(self, replica_id: int) -> None:
        client = self.pool.clients[replica_id]
        if client is not None and not client.dead:
            client.dead = True
            self.dead.append((replica_id, client))

    async def report(self, which: int, how: str) -> None:
        """Let somebody report one of the deaths, of which others may be long past."""
        if not self.dead:
            return
        replica_id, client = self.dead[which % len(self.dead)]
        if how == "poll":  # whose answer was on its way
            with pytest.raises(EngineDeadError) as found:
                await client.get_output_async()
            await self.omni._handle_dead_replica(0, replica_id, found.value)
        elif how == "process" and self.pool.clients[replica_id] is client:
            process = SimpleNamespace(name="EngineCore", exitcode=-9, is_alive=lambda: False)
            client.resources = SimpleNamespace(engine_manager=SimpleNamespace(processes=[process]))
            self.now += 10.0
            await self.omni.liveness.check(self.omni.stage_pools, self.now)
        elif how == "hang":
            self.omni.hang_detector.terminate(self.pool, replica_id)

    async def do(self, kind: str, number: int) -> None:
        match kind:
            case "die":
                self.die(number % REPLICAS)
            case "poll" | "process" | "hang":
                await self.report(number, kind)
            case "send":
                self.asked += 1
                await self.ask(f"r{self.asked}", (self.asked,))
            case "turn":
                await self.turn()
            case "settle":
                await self.settle()
            case "hold":
                self.runtime.go.clear()
            case "go":
                self.runtime.go.set()
            case "fail":
                self.runtime.fails += 1
                self.failed += 1
            case "tick":
                await self.tick(float(number))

    async def end(self) -> None:
        """Nothing dies any more, and time passes."""
        self.runtime.go.set()
        for _ in range(12 + self.failed):
            await self.settle()
            await self.tick(60.0)
            await self.finish_all()


KINDS = ["die", "die", "poll", "poll", "process", "hang", "send", "turn", "settle", "hold", "go", "fail", "tick"]
Steps = list[tuple[str, int]]


async def play(steps: Steps) -> None:
    async with ReportingRig(StageSpec(REPLICAS, final_output=True), **OPTIONS) as rig:
        for kind, number in steps:
            await rig.do(kind, number)
        await rig.end()
        assert rig.runtime.wrong == []
        assert len(rig.runtime.started) == len(rig.dead)
        assert rig.runtime.fails == 0 or not rig.dead
        assert rig.pool.live_replica_ids() == list(range(REPLICAS))
        assert [len(rig.ends(f"r{number + 1}")) for number in range(rig.asked)] == [1] * rig.asked
        assert not rig.left_over()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=25))
def test_a_death_leads_to_one_start(steps: Steps) -> None:
    asyncio.run(play(steps))


SEEN: Steps = [("send", 0), ("die", 0), ("hold", 0), ("settle", 0), ("poll", 0), ("settle", 0), ("tick", 9)]
"""It is being started when a poll of the dead process answers that was under way."""
LATE: Steps = [("die", 0), ("settle", 0), ("send", 0), ("poll", 0), ("settle", 0)]
"""It has been started again when the other poll answers."""


@pytest.mark.parametrize("steps", [SEEN, LATE], ids=["while it starts", "after it was started"])
def test_a_late_report_of_a_death_changes_nothing(steps: Steps) -> None:
    asyncio.run(play(steps))


@pytest.mark.asyncio
async def test_no_process_takes_the_place_of_one_that_serves() -> None:
    async with Rig(FINAL) as rig:
        pool, client = rig.omni.stage_pools[0], rig.replica(0)
        with pytest.raises(ValueError, match="stage 0 replica 0 serves"):
            pool.attach(0, rig.runtime._make(0))
        assert pool.clients == [client]

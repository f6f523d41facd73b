"""Which replica of a stage a request goes to."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from tests.support.omni_stages import Rig, StageSpec, of
from vllm_omni_sched.resource.pipeline.balance import CostBalancer

pytestmark = [pytest.mark.omni, pytest.mark.asyncio]

TWO = StageSpec(replicas=2, final_output=True)


@pytest.mark.parametrize(("enabled", "where"), [(True, 1), (False, 0)])
async def test_a_user_goes_where_that_user_was(enabled: bool, where: int) -> None:
    async with Rig(TWO, graph={"affinity": {"enabled": enabled}}) as rig:
        await rig.ask("x", (1,))
        await rig.ask("a", (2,), params=of(user="u"))
        assert rig.replica_id(0, "a") == 1
        await rig.finish(0, "x", "a")
        await rig.ask("b", (3,), params=of(user="u"))
        assert rig.replica_id(0, "b") == where
        lookups = [rig.driver.board.replicas[0, i].lookups["hit"] for i in (0, 1)]
        assert lookups == ([0, 1] if enabled else [0, 0])


async def test_what_a_dead_replica_had_is_not_looked_for_there() -> None:
    async with Rig(TWO) as rig:
        await rig.ask("x", (1,))
        await rig.ask("a", (2,), params=of(user="u"))
        await rig.finish(0, "x", "a")
        await rig.kill(0, 1)
        await rig.ask("b", (3,), params=of(user="u"))
        assert rig.replica_id(0, "b") == 0


@pytest.mark.parametrize(("policy", "where"), [("cost", 1), ("least-queue", 0)])
async def test_by_cost_a_long_request_weighs_more_than_two_short_ones(policy: str, where: int) -> None:
    async with Rig(TWO, balancing={"policy": policy}) as rig:
        await rig.ask("long", (1,), params={"max_tokens": 1000})
        for i in range(2):
            await rig.ask(f"{i}", (10 + i,), params={"max_tokens": 1})
        if policy == "least-queue":
            assert [rig.replica_id(0, f"{i}") for i in range(2)] == [1, where]
        else:
            assert [rig.replica_id(0, f"{i}") for i in range(2)] == [1, 1]


async def test_a_session_is_balanced_too() -> None:
    async with Rig(TWO) as rig:
        await rig.ask("x", (1,))
        await rig.ask("s", (2,), resumable=True)
        assert rig.replica_id(0, "s") == 1


async def test_a_slower_replica_gets_less() -> None:
    async with Rig(TWO, balancing={"policy": "round-robin"}) as rig:
        stage = rig.omni.stage_pools[0].queue.stage
        for i in range(24):  # replica 1 takes four times as long
            await rig.ask(f"a{i}", (i, 1))
            rig.now += 4.0 if rig.replica_id(0, f"a{i}") else 1.0
            await rig.finish(0, f"a{i}")
        fast, slow = (stage.replicas[at].load.speed for at in (0, 1))
        assert fast / slow == pytest.approx(4.0, rel=0.2)
        stage.gate.balancer = CostBalancer()
        for i in range(10):
            await rig.ask(f"{i}", (i, 3))
        assert sum(rig.replica_id(0, f"{i}") == 0 for i in range(10)) == 8


async def test_a_session_does_not_go_where_nothing_comes_from() -> None:
    async with Rig(TWO) as rig:
        pool = rig.omni.stage_pools[0]
        pool.suspect(0)
        assert {pool.select_replica_id(f"{i}") for i in range(4)} == {1}

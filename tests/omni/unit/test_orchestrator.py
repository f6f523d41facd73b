"""The whole of it under random traffic: every request leaves once, with its own answer, and nothing of it is left."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="vLLM-Omni is not installed")

from vllm_omni.engine.messages import ErrorMessage

from tests.support.omni_stages import CUMULATIVE, FINAL_ONLY, Rig, StageSpec, params

pytestmark = [pytest.mark.omni, pytest.mark.asyncio, pytest.mark.waits]  # each turn of a loop waits a millisecond

STAGES = (
    StageSpec(replicas=2, max_num_seqs=3),
    StageSpec(replicas=2, max_num_seqs=2, edge=True),
    StageSpec(final_output=True, max_num_seqs=4, edge=True),
)
OPTIONS = {
    "runtime": {
        "credits": {"enabled": True, "capacity": 6},
        "recovery": {"max_redispatches": 99, "max_restarts": 99, "max_wait_seconds": 1e6},
    },
}
EMPTY = (
    "the deduplicator keeps the end of a request that was aborted while it ran: see test_output_deduplicator",
    {"deduplicator"},
)


class Traffic:
    """Random traffic: clients, engines and deaths."""

    def __init__(self, rig: Rig, rng: Random, deaths: float, late: float) -> None:
        self.rig, self.rng, self.deaths, self.late = rig, rng, deaths, late
        self.asked: dict[str, tuple[int, ...]] = {}
        self.aborted: set[str] = set()

    async def happen(self) -> None:
        rng = self.rng
        chance = rng.random()
        if chance < 0.3:
            await self.ask()
        elif chance < 0.4:
            await self.abort()
        elif chance < 0.4 + self.deaths:
            await self.die()
        elif chance < 0.4 + self.deaths + self.late:
            await self.send()
        else:
            await self.work()

    async def ask(self) -> None:
        rng, name = self.rng, f"r{len(self.asked)}"
        tokens = rng.choice([(1, 2, 3), (4, 5), (6,)])
        kind = rng.choice([CUMULATIVE, CUMULATIVE, FINAL_ONLY])
        last = params(output_kind=kind, max_tokens=rng.choice([16, 16, 17]))
        middle = params(max_tokens=rng.choice([16, 16, 17]))
        drawn = rng.random() < 0.2  # it merges with nobody
        await self.rig.ask(name, tokens, each=[params(temperature=1.0 if drawn else 0.0), middle, last])
        self.asked[name] = tokens

    async def abort(self) -> None:
        here = sorted(self.rig.omni.request_states)
        if here:
            names = self.rng.sample(here, min(len(here), self.rng.choice([1, 1, 2])))
            self.aborted.update(names)
            await self.rig.abort(*names)

    async def die(self) -> None:
        stage_id = self.rng.randrange(len(STAGES))
        alive = self.rig.omni.stage_pools[stage_id].live_replica_ids()
        if alive:
            await self.rig.kill(stage_id, self.rng.choice(alive))

    async def send(self) -> None:
        """What engines have held back goes out; from now on some of them hold back what they make."""
        for client in self.clients():
            client.sends_late = self.rng.random() < 0.5
            if not client.sends_late:
                client.send()
        await self.rig.settle()

    def clients(self) -> list[Any]:
        return [client for pool in self.rig.omni.stage_pools for client in pool.clients if client is not None]

    async def work(self) -> bool:
        able = [
            (client, name)
            for stage_id in range(len(STAGES))
            for name, client in sorted(self.rig.at(stage_id).items())
            if client.input_of(name) is not None
        ]
        if able:
            client, name = self.rng.choice(able)
            (client.step if self.rng.random() < 0.5 else client.finish)(name)
            await self.rig.settle()
        return bool(able)

    async def all_end(self) -> None:
        for _ in range(600):
            if not self.rig.omni.request_states:
                return
            if not await self.work():
                for client in self.clients():
                    client.send()
                await self.rig.tick(1.0)
        raise AssertionError(
            f"these do not end: {list(self.rig.omni.request_states)}; left: {sorted(self.rig.left_over())}"
        )


async def run(seed: int, deaths: float, late: float = 0.0, *, async_chunk: bool = False) -> None:
    async with Rig(*STAGES, async_chunk=async_chunk, **OPTIONS) as rig:
        traffic = Traffic(rig, Random(seed), deaths, late)
        for _ in range(70):
            await traffic.happen()
        await traffic.all_end()
        for name, tokens in traffic.asked.items():
            ends = rig.ends(name)
            if name in traffic.aborted:
                assert len(ends) <= 1, name
            elif ends and isinstance(ends[0], ErrorMessage):
                assert "poison" in rig.error(name)
                assert deaths
            else:
                assert rig.answer(name) == rig.expected(tokens), name
        why, left = EMPTY
        assert {name for name in rig.left_over() if name not in left} == set(), why


@pytest.mark.parametrize("seed", range(12))
async def test_every_request_leaves_once(seed: int) -> None:
    await run(seed, 0.0)


@pytest.mark.parametrize("seed", range(12))
async def test_every_request_leaves_once_while_replicas_die(seed: int) -> None:
    await run(1000 + seed, 0.06)


@pytest.mark.parametrize("async_chunk", [False, True])
@pytest.mark.parametrize("seed", range(12))
async def test_every_request_leaves_once_though_replicas_die_before_they_send(seed: int, async_chunk: bool) -> None:
    """A replica says that it is done before it has sent what it has made; what it has not sent dies with it."""
    await run(2000 + seed, 0.08, 0.12, async_chunk=async_chunk)

"""Which requests share a stage's work, and how those that part after it each get its output."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from vllm.sampling_params import RequestOutputKind

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.omni.stages.caches import sends_caches
from vllm_omni_sched.omni.stages.content import first_key, next_key, seeded
from vllm_omni_sched.omni.stages.payloads import Payloads
from vllm_omni_sched.omni.stages.work import Work

PAYLOAD_SECONDS = 30.0  # as long as a stage may take to send what it has made
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.1  # seconds between two looks for it
SEALED = 4096  # keys that are remembered to be closed


class Sharing:
    """Keys of works, and payloads for those that part.

    1. The key of a request's first stage is that of its content; of each later one it follows from the one before and
       from the sampling parameters, as the input does.
    2. In async-chunk mode stages exchange pieces under the name of one request: there a key covers all stages, and
       who shares one shares all.
    3. A request that gets only what is new (DELTA) cannot join work that has said something already; and in
       async-chunk mode nobody can join after a stage has ended.
    4. What was sent to a stage for a request that joins another one there is taken back when that request leaves; until
       then it may have to run by itself yet.

    Args:
        orchestrator: ours.
    """

    def __init__(self, orchestrator: Any, payloads: Payloads) -> None:
        self._orchestrator, self._payloads = orchestrator, payloads
        self._keys: dict[str, dict[int, str | None]] = {}  # of each request, by stage
        self._sealed: OrderedDict[str, int] = OrderedDict()  # content -> how often its key was closed
        self._sent: dict[str, set[int]] = {}  # stages to which a payload goes in a request's name
        self._unread: dict[str, set[int]] = {}  # those of them where it joined another request

    def describe(self, pool: Any, request_id: str, state: Any, request: Any, how: dict[str, Any], now: float) -> Work:
        """What a submission is."""
        work: Work = self._orchestrator.policies.describe(pool, request_id, state, request, how, now)
        if self._orchestrator.policies.merges and not sends_caches(self._orchestrator.stage_pools):
            drawn = pool.stage_type == "diffusion" and not seeded(state.sampling_params_list[pool.stage_id])
            work.key = None if drawn else self._key(pool.stage_id, request_id, state, request)
            self._keys.setdefault(request_id, {})[pool.stage_id] = work.key
        return work

    def _key(self, stage_id: int, request_id: str, state: Any, request: Any) -> str | None:
        known = self._keys.get(request_id, {})
        if stage_id == 0:
            content = first_key(state, request, state.final_stage_id if self._orchestrator.async_chunk else 0)
            return content and f"{content}/{self._sealed.get(content, 0)}"
        upstream = known.get(stage_id - 1)
        if upstream is None:
            return None
        return f"{upstream}/{stage_id}" if self._orchestrator.async_chunk else next_key(state, stage_id, upstream)

    def spoke(self, stage_id: int, receivers: Sequence[str]) -> None:
        """A work has put out a part of its output, for these."""
        kind = self._orchestrator._output_kind(receivers[0], stage_id)
        if kind is RequestOutputKind.DELTA:
            self._seal(receivers[0])

    def joined(self, work: Work) -> None:
        """A work is done by that of another request."""
        if work.stage_id in self._sent.get(work.request_id, ()):
            self._unread.setdefault(work.request_id, set()).add(work.stage_id)

    def ended(self, stage_id: int, request_id: str, receivers: Sequence[str]) -> None:
        """A work has ended well that was begun for ``request_id``: see to it that all that part get the payload."""
        if self._orchestrator.async_chunk:
            self._seal(receivers[0])
            return
        if stage_id + 1 >= len(self._orchestrator.stage_pools):
            return
        pool = self._orchestrator.stage_pools[stage_id + 1]
        if not self._payloads.arrive_at(pool):
            return
        names = [request_id] if list(receivers) == [request_id] else self._parting(stage_id, receivers)
        for name in names:
            if name in self._orchestrator.request_states:
                self._sent.setdefault(name, set()).add(pool.stage_id)
        if names and names != [request_id]:
            sending = self._orchestrator.spawn(self._send_on(pool, request_id, names))
            for name in names:
                pool.queue.held[name] = sending

    async def _send_on(self, pool: Any, owner: str, names: Sequence[str]) -> None:
        try:
            await self._when_there(partial(self._payloads.copy, pool, owner, names))
        finally:
            for name in names:
                pool.queue.held.pop(name, None)
            await pool.queue.release()

    async def _when_there(self, take: Callable[[], bool]) -> None:
        """Take a payload as soon as it is there; no thread waits for it."""
        loop, until = asyncio.get_running_loop(), monotonic_seconds() + PAYLOAD_SECONDS
        pause = SHORTEST_PAUSE
        while not await loop.run_in_executor(None, take) and monotonic_seconds() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _parting(self, stage_id: int, receivers: Sequence[str]) -> list[str]:
        """Those that will run at the next stage themselves: the first with each key there."""
        found: dict[str, str] = {}
        for name in receivers:
            state = self._orchestrator.request_states.get(name)
            if state is None or state.final_stage_id <= stage_id:
                continue
            upstream = self._keys.get(name, {}).get(stage_id)
            key = next_key(state, stage_id + 1, upstream) if upstream is not None else None
            if self._orchestrator.stage_pools[stage_id + 1].queue.merger.members(name):
                key = None  # it was there before a death, and comes again as the leader that it is
            found.setdefault(key or f"only {name}", name)
        return list(found.values())

    def _seal(self, request_id: str) -> None:
        """Nobody may join what this request has begun."""
        key = self._keys.get(request_id, {}).get(0)
        if key is None:
            return
        content, _, number = key.partition("/")
        if self._sealed.get(content, 0) == int(number):
            self._sealed[content] = int(number) + 1
            self._sealed.move_to_end(content)
            while len(self._sealed) > SEALED:
                self._sealed.popitem(last=False)

    def forget(self, request_id: str) -> None:
        self._keys.pop(request_id, None)
        self._sent.pop(request_id, None)
        for stage_id in self._unread.pop(request_id, ()):
            pool = self._orchestrator.stage_pools[stage_id]
            self._orchestrator.spawn(self._when_there(partial(self._payloads.copy, pool, request_id, ())))

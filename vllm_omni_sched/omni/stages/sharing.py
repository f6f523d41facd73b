"""Decide which requests share a stage's work, and deliver its output to each of those that part after it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind

from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.omni.stages.content import first_key, next_key, seeded
from vllm_omni_sched.omni.stages.payloads import Payloads
from vllm_omni_sched.omni.stages.start.caches import sends_caches
from vllm_omni_sched.omni.stages.work import Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.orchestrator import ScheduledOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

PAYLOAD_SECONDS = 30.0  # how long to look for a payload that is no longer needed
SHORTEST_PAUSE, LONGEST_PAUSE = 0.002, 0.1  # seconds between two polls for it
SEALED = 4096  # closed keys that are remembered


@dataclass(eq=False)
class _Sending:
    """Holds what is known of a payload that was sent for one request and is to be delivered to several."""

    sent_as: str  # name of the run that it was sent for
    names: list[str]
    taken: bool = False


class Sharing:
    """Keys of works, and payloads for requests that part after sharing work.

    1. The key of a request's first stage is that of its content; the key of each later one follows from the one before
       and from the sampling parameters, as the input does.
    2. In async-chunk mode stages exchange pieces under the name of one request: a key covers all stages there, and
       requests that share one stage share all.
    3. A request that gets only new output (DELTA) cannot join work that has put something out already; and in
       async-chunk mode no request can join after a stage has ended.
    4. A payload for a request that never runs in the stage is removed when that request leaves: one that
       follows another, and might have had to run by itself until then; or one that leaves while it waits. The new
       leader in its place gets the payload.
    5. Requests that part wait until the payload is there, however long the stage takes to send it. If its replica dies
       first, they run again (`RecoveryDriver`) and wait no longer.
    """

    def __init__(self, orchestrator: ScheduledOrchestrator, payloads: Payloads) -> None:
        self._orchestrator, self._payloads = orchestrator, payloads
        self._keys: dict[str, dict[int, str | None]] = {}  # of each request, by stage
        self._sealed: OrderedDict[str, int] = OrderedDict()  # content -> how often its key was closed
        self._unread: dict[str, set[int]] = {}  # stages where a payload lies, by its request
        self._shares: dict[tuple[int, str], str] = {}  # by stage and request: the request that got the payload for it
        self._sendings: dict[tuple[int, str], _Sending] = {}  # by stage and waiting request

    def describe(
        self, pool: ScheduledPool, request_id: str, state: Any, request: Any, submit_args: dict[str, Any], now: float
    ) -> Work:
        """Describe a submission as a `Work`, with its key."""
        work: Work = self._orchestrator.driver.describe(pool, request_id, state, request, submit_args, now)
        if self._orchestrator.driver.merges and not sends_caches(self._orchestrator.stage_pools):
            drawn = pool.stage_type == "diffusion" and not seeded(state.sampling_params_list[pool.stage_id])
            work.key = None if drawn else self._key(pool.stage_id, request_id, state, request)
            self._keys.setdefault(request_id, {})[pool.stage_id] = work.key
        return work

    def _key(self, stage_id: int, request_id: str, state: Any, request: Any) -> str | None:
        known = self._keys.get(request_id, {})
        if stage_id == 0:
            content = first_key(
                state, request, range(state.final_stage_id + 1) if self._orchestrator.async_chunk else [0]
            )
            return content and f"{content}/{self._sealed.get(content, 0)}"
        upstream = known.get(stage_id - 1)
        if upstream is None:
            return None
        return f"{upstream}/{stage_id}" if self._orchestrator.async_chunk else next_key(state, stage_id, upstream)

    def on_first_output(self, stage_id: int, receivers: Sequence[str]) -> None:
        """Record that a work has put out a part of its output for these requests."""
        kind = self._orchestrator._output_kind(receivers[0], stage_id)
        if kind is RequestOutputKind.DELTA:
            self._seal(receivers[0])

    def payload_sent(self, request_id: str, stage_id: int) -> None:
        """Record that a payload for the request is, or will be, at the stage."""
        self._unread.setdefault(request_id, set()).add(stage_id)

    def payload_lost(self, request_id: str, stage_id: int) -> None:
        """Record that no payload will be there unless it is made again."""
        self._unread.get(request_id, set()).discard(stage_id)

    def payload_read(self, work: Work) -> None:
        """Record that a replica has a work, and receives its payload."""
        self._unread.get(work.request_id, set()).discard(work.stage_id)

    def inherits(self, owner: str, heir: Work) -> None:
        """Let the new leader run on the payload of the request that has left, unless it has its own."""
        stages, own = self._unread.get(owner, set()), self._unread.setdefault(heir.request_id, set())
        pool, name = self._orchestrator.stage_pools[heir.stage_id], heir.request_id
        if heir.stage_id in own or self._orchestrator.async_chunk or not self._payloads.arrive_at(pool):
            return
        if heir.stage_id not in stages:  # lost with a replica, or being made again for the request that left
            self._orchestrator.recovery.remake_input(pool, name)
        else:
            stages.discard(heir.stage_id)
            own.add(heir.stage_id)
            sending = self._sendings.pop((pool.stage_id, owner), None)
            pool.queue.resume(owner)
            if sending is None or sending.taken:
                self._begin(pool, self._payloads.external(owner), [name])
            else:
                sending.names[sending.names.index(owner)] = name
                self._sendings[pool.stage_id, name] = sending
                pool.queue.hold(name)

    def leads(self, pool: ScheduledPool, work: Work) -> None:
        """Get the payload of a shared work for a request that runs by itself in a stage.

        That happens when the group that it was to join is full.
        """
        name = work.request_id
        other = self._shares.get((pool.stage_id, name), name)
        if other == name or pool.stage_id in self._unread.get(name, ()):
            return
        if pool.stage_id in self._unread.get(other, ()) and pool.queue.leader_of(other) != other:
            self.inherits(other, work)
        else:  # the other request needs the payload, or has it
            self._orchestrator.recovery.remake_input(pool, name)

    def ended(self, stage_id: int, request_id: str, receivers: Sequence[str]) -> None:
        """Record the end of the work begun for ``request_id``, and deliver the payload to all receivers that part."""
        if self._orchestrator.async_chunk:
            self._seal(receivers[0])
            return
        if stage_id + 1 >= len(self._orchestrator.stage_pools):
            return
        pool = self._orchestrator.stage_pools[stage_id + 1]
        if not self._payloads.arrive_at(pool):
            return
        shares = {request_id: request_id} if list(receivers) == [request_id] else self._parting(stage_id, receivers)
        names = list(dict.fromkeys(shares.values()))
        self._shares.update({(pool.stage_id, name): other for name, other in shares.items()})
        for name in names:
            state = self._orchestrator.request_states.get(name)
            if state is not None and state.final_stage_id > stage_id:
                self.payload_sent(name, pool.stage_id)
        if names and names != [request_id]:
            self._begin(pool, self._payloads.external(request_id), names)

    def _begin(self, pool: ScheduledPool, sent_as: str, names: Sequence[str]) -> None:
        sending = _Sending(sent_as, list(names))
        for name in names:
            self.stop_waiting(pool, name)
            self._sendings[pool.stage_id, name] = sending
            pool.queue.hold(name)
        self._orchestrator.spawn(self._send_on(pool, sending))

    async def _send_on(self, pool: ScheduledPool, sending: _Sending) -> None:
        loop, pause = asyncio.get_running_loop(), SHORTEST_PAUSE
        try:
            while sending.names:
                found = await loop.run_in_executor(None, self._payloads.take, pool, sending.sent_as)
                if found is not None:
                    sending.taken = True
                    await loop.run_in_executor(None, self._payloads.send, pool, sending.names, found[0])
                    break
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            for name in list(sending.names):
                if self._sendings.get((pool.stage_id, name)) is sending:
                    self.stop_waiting(pool, name)
            await pool.queue.release()

    def stop_waiting(self, pool: ScheduledPool, request_id: str) -> bool:
        """End the wait of a request for its payload; return whether it waited for one sent to another request."""
        sending = self._sendings.pop((pool.stage_id, request_id), None)
        if sending is None:
            return False
        if not sending.taken:
            sending.names.remove(request_id)
        pool.queue.resume(request_id)
        return True

    async def when_there(self, take: Callable[[], bool], seconds: float | None = None) -> None:
        """Receive a payload as soon as it is there, without blocking a thread; ``seconds``: how long to look for it."""
        loop = asyncio.get_running_loop()
        until = monotonic_seconds() + (PAYLOAD_SECONDS if seconds is None else seconds)
        pause = SHORTEST_PAUSE
        while not await loop.run_in_executor(None, take) and monotonic_seconds() < until:
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _parting(self, stage_id: int, receivers: Sequence[str]) -> dict[str, str]:
        """Return, for each request that goes on, the request whose work at the next stage it should share."""
        found: dict[str, str] = {}
        shares: dict[str, str] = {}
        for name in receivers:
            state = self._orchestrator.request_states.get(name)
            if state is None or state.final_stage_id <= stage_id:
                continue
            upstream = self._keys.get(name, {}).get(stage_id)
            key = next_key(state, stage_id + 1, upstream) if upstream is not None else None
            if self._orchestrator.stage_pools[stage_id + 1].queue.merger.members(name):
                key = None  # it was there before a death, and comes again as the leader
            shares[name] = found.setdefault(key or f"only {name}", name)
        return shares

    def _seal(self, request_id: str) -> None:
        """Let no further request join the work that this request has begun."""
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
        for pool in self._orchestrator.stage_pools:
            self._shares.pop((pool.stage_id, request_id), None)
        for pool in self._orchestrator.stage_pools:
            sending = self._sendings.get((pool.stage_id, request_id))
            if self.stop_waiting(pool, request_id) and sending is not None and not (sending.taken or sending.names):
                self._orchestrator.spawn(self.when_there(partial(self._payloads.copy, pool, sending.sent_as, ())))
                self._unread.get(request_id, set()).discard(pool.stage_id)
        for stage_id in self._unread.pop(request_id, ()):
            pool = self._orchestrator.stage_pools[stage_id]
            take = partial(self._payloads.copy, pool, self._payloads.external(request_id), ())
            self._orchestrator.spawn(self.when_there(take))

"""Decide which requests share work in stages that branch, and see to it that each stage gets the payloads it needs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind

from vllm_omni_sched.graph.flow import FlowPlan
from vllm_omni_sched.omni.stages import sharing
from vllm_omni_sched.omni.stages.branches.payloads import Edge, EdgePayloads
from vllm_omni_sched.omni.stages.content import first_key, next_key, seeded
from vllm_omni_sched.omni.stages.recovery import recovery_driver
from vllm_omni_sched.omni.stages.sharing import Sharing
from vllm_omni_sched.omni.stages.work import Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.branches.orchestrator import BranchingOrchestrator
    from vllm_omni_sched.omni.stages.pool import ScheduledPool


@dataclass(eq=False)
class BranchPayload:
    """A payload that lies on an edge, or is about to.

    ``names``: of the runs that it was sent to, the present one last. ``holders``: the requests that need it.
    ``taken``: a replica may have received it. ``lost``: it does not come unless it is made again.
    """

    edge: Edge
    names: list[str]
    holders: set[str]
    taken: bool = False
    lost: bool = False
    move: asyncio.Task[None] | None = field(default=None, repr=False)


class BranchSharing(Sharing):
    """Keys of works of stages that branch, and the payloads between these stages.

    1. Requests share the first stage if their content, the outputs that they ask for and the parameters of all stages
       are equal that its output reaches through connectors. So they never part where a payload would have to be copied.
    2. At a stage that reads payloads or chunks, those requests share that got the outputs of the same work.
    3. At a stage that gets prompts from the front end, requests share whose inputs and parameters are equal. They may
       come from different works, and part from requests with other parameters.
    4. A request that gets only new output (DELTA) cannot join work that has put something out already. Once a stage
       that exchanges chunks has ended, no request can join the work of its first stage.
    5. If the request leaves whose run a payload was sent to, the payload is sent to the run of the one in its place;
       if it was lost, it is made again.
    6. A payload that no request needs any more, and that no stage has shown to have read, is removed.
    """

    _orchestrator: BranchingOrchestrator
    _payloads: EdgePayloads

    def __init__(self, orchestrator: BranchingOrchestrator, payloads: EdgePayloads) -> None:
        super().__init__(orchestrator, payloads)
        self._owners: dict[str, dict[int, str]] = {}  # the request whose work a request got the output of, by stage
        self._lying: dict[str, dict[Edge, BranchPayload]] = {}  # by request that needs them
        self._waits: dict[tuple[int, str], int] = {}  # payloads on their way to the run of a request, by stage

    # ---- keys

    def describe(
        self, pool: ScheduledPool, request_id: str, state: Any, request: Any, submit_args: dict[str, Any], now: float
    ) -> Work:
        driver = self._orchestrator.driver
        work: Work = driver.describe(pool, request_id, state, request, submit_args, now)
        if driver.merges and work.known.flow is not None:
            plan = work.known.flow.plan
            sources = plan.sources[pool.stage_id]
            key = self._content(pool, request_id, state, request, plan)
            self._keys.setdefault(request_id, {})[pool.stage_id] = key
            delta = self._orchestrator._output_kind(request_id, pool.stage_id) is RequestOutputKind.DELTA
            if key is not None and sources and (delta or self._by_connector(sources, pool.stage_id)):
                key = f"{pool.stage_id} of {[self._owner(request_id, source) for source in sources]}"
            work.key = key
        return work

    def _content(self, pool: ScheduledPool, request_id: str, state: Any, request: Any, plan: FlowPlan) -> str | None:
        """Return the key of what a stage makes for a request; None if it may differ between runs."""
        stage_id = pool.stage_id
        if pool.stage_type == "diffusion" and not seeded(state.sampling_params_list[stage_id]):
            return None
        reached, sources = self._reached(stage_id, plan), plan.sources[stage_id]
        if not sources:
            content = first_key(state, request, reached)
            return content and f"{content}/{self._sealed.get(content, 0)}"
        known = self._keys.get(request_id, {})
        upstream = [known.get(source) for source in sources]
        return None if None in upstream else next_key(state, stage_id, upstream, reached)

    def _reached(self, stage_id: int, plan: FlowPlan) -> list[int]:
        """Return a stage, and those that its output reaches through connectors, directly or indirectly."""
        found = [stage_id]
        for one in found:
            carried = (after for after in plan.successors[one] if self._payloads.carries((one, after)))
            found += [after for after in carried if after not in found]
        return sorted(found)

    def _by_connector(self, sources: Iterable[int], stage_id: int) -> list[int]:
        """Return those of the sources whose output a stage gets by a connector."""
        return [source for source in sources if self._payloads.carries((source, stage_id))]

    def _owner(self, request_id: str, stage_id: int) -> str:
        """Return the request in whose name the work runs, or ran, whose output a request gets."""
        known = self._owners.get(request_id, {}).get(stage_id)
        return known or self._orchestrator.stage_pools[stage_id].queue.leader_of(request_id)

    # ---- payloads

    def ended(self, stage_id: int, request_id: str, receivers: Sequence[str]) -> None:
        for name in receivers:
            if name in self._orchestrator.request_states:
                self._owners.setdefault(name, {})[stage_id] = request_id
        if self._orchestrator.driver.graph.exchanges_chunks(stage_id):
            self._seal(receivers[0])
        for target, name in self._orchestrator.whole_sent_to(request_id, stage_id).items():
            queue = self._orchestrator.stage_pools[target].queue
            holders = {each for receiver in receivers for each in queue.receivers(receiver)}
            self._lie(BranchPayload((stage_id, target), [name], holders))

    def leads(self, pool: ScheduledPool, work: Work) -> None:
        self._fetch(pool, work.request_id)

    def inherits(self, owner: str, heir: Work) -> None:
        self._fetch(self._orchestrator.stage_pools[heir.stage_id], heir.request_id)

    def _fetch(self, pool: ScheduledPool, request_id: str) -> None:
        """Let the payloads that a request needs in a stage come to its own run there."""
        present = self._orchestrator.run_name(request_id, pool.stage_id)
        lost = []
        for payload in self._into(request_id, pool.stage_id):
            if payload.lost or payload.taken:
                lost.append(payload.edge[0])
            elif payload.names[-1] != present:
                self._move(pool, request_id, payload, present)
        if lost:
            self._orchestrator.recovery.remake_inputs(pool, request_id, lost)

    def _move(self, pool: ScheduledPool, request_id: str, payload: BranchPayload, name: str) -> None:
        waiting = pool.stage_id, request_id
        before = payload.names[-1]
        payload.names.append(name)
        self._waits[waiting] = self._waits.get(waiting, 0) + 1
        self._sendings[waiting] = payload  # type: ignore[assignment]
        pool.queue.hold(request_id)
        payload.move = self._orchestrator.spawn(self._moved(pool, waiting, payload, (before, name), payload.move))

    async def _moved(
        self,
        pool: ScheduledPool,
        waiting: tuple[int, str],
        payload: BranchPayload,
        names: tuple[str, str],
        earlier: asyncio.Task[None] | None,
    ) -> None:
        loop, pause = asyncio.get_running_loop(), sharing.SHORTEST_PAUSE
        try:
            if earlier is not None:
                await asyncio.wait([earlier])
            move = partial(self._payloads.move, payload.edge, *names)
            while payload.holders and not payload.lost and not await loop.run_in_executor(None, move):
                await asyncio.sleep(pause)
                pause = min(2 * pause, sharing.LONGEST_PAUSE)
        finally:
            self._waits[waiting] -= 1
            if not self._waits[waiting]:
                del self._waits[waiting]
                self._sendings.pop(waiting, None)
                pool.queue.resume(waiting[1])
            await pool.queue.release()

    def payload_name(self, request_id: str, edge: Edge) -> str:
        """Return the name of the run to which the payload on an edge was sent that a request needs."""
        payload = self._lying.get(request_id, {}).get(edge)
        return self._orchestrator.run_name(request_id, edge[1]) if payload is None else payload.names[-1]

    def sent(self, request_id: str, edge: Edge) -> None:
        """Record that a payload for the present run of a request lies, or will lie, on an edge."""
        name = self._orchestrator.run_name(request_id, edge[1])
        receivers = self._orchestrator.stage_pools[edge[1]].queue.receivers(request_id)
        for each in (request_id, *receivers):
            payload = self._lying.get(each, {}).get(edge)
            if payload is not None:
                if payload.names[-1] != name:
                    payload.names.append(name)
                payload.taken = payload.lost = False
                return
        self._lie(BranchPayload(edge, [name], {request_id, *receivers}))

    def lost(self, request_id: str, edge: Edge) -> None:
        """Record that no payload will lie there unless it is made again."""
        for payload in self._into(request_id, edge[1]):
            payload.lost = payload.lost or payload.edge == edge

    def payload_read(self, work: Work) -> None:
        for payload in self._into(work.request_id, work.stage_id):
            payload.taken = True

    def arrived(self, request_id: str, stage_id: int) -> None:
        """Record that a stage has read its payloads."""
        for payload in self._into(request_id, stage_id):
            for name in list(payload.holders):
                self._let_go(name, payload)

    def unneeded(self, request_id: str, stage_id: int) -> None:
        """Record that a request needs a stage no longer."""
        if stage_id in [edge[1] for edge in self._lying.get(request_id, ())]:
            for payload in [one for edge, one in self._lying[request_id].items() if edge[1] == stage_id]:
                self._release(request_id, payload)

    def forget(self, request_id: str) -> None:
        self._keys.pop(request_id, None)
        self._owners.pop(request_id, None)
        for payload in list(self._lying.get(request_id, {}).values()):
            self._release(request_id, payload)

    def stop_waiting(self, pool: ScheduledPool, request_id: str) -> bool:
        return (pool.stage_id, request_id) in self._waits  # the payload is marked as lost, which ends the wait

    def _into(self, request_id: str, stage_id: int) -> list[BranchPayload]:
        """Return the payloads for the work of a stage that was begun for a request, which may have left."""
        names = request_id, *self._orchestrator.stage_pools[stage_id].queue.receivers(request_id)
        found = {
            edge: payload
            for name in reversed(names)
            for edge, payload in self._lying.get(name, {}).items()
            if edge[1] == stage_id
        }
        return list(found.values())

    def _lie(self, payload: BranchPayload) -> None:
        """Record a payload for the requests that need it and have not left."""
        payload.holders = {name for name in payload.holders if name in self._orchestrator.request_states}
        if not payload.holders:
            self._orchestrator.spawn(self._remove(payload))
        for name in payload.holders:
            before = self._lying.setdefault(name, {}).get(payload.edge)
            if before is not None:
                before.holders.discard(name)
            self._lying[name][payload.edge] = payload

    def _let_go(self, request_id: str, payload: BranchPayload) -> None:
        payload.holders.discard(request_id)
        payloads = self._lying.get(request_id, {})
        if payloads.get(payload.edge) is payload:
            del payloads[payload.edge]
        if not payloads:
            self._lying.pop(request_id, None)

    def _release(self, request_id: str, payload: BranchPayload) -> None:
        """Record that a request does not need a payload, and remove it if no other one does."""
        self._let_go(request_id, payload)
        if not payload.holders and not payload.lost:
            self._orchestrator.spawn(self._remove(payload))

    async def _remove(self, payload: BranchPayload) -> None:
        if payload.move is not None:
            await asyncio.wait([payload.move])

        def take() -> bool:
            return any(self._payloads.discard_from(payload.edge, name) for name in payload.names)

        # a replica may have taken it
        await self.when_there(take, recovery_driver.HELD_SECONDS if payload.taken else sharing.PAYLOAD_SECONDS)

"""A stage's replicas with a queue before them: vLLM-Omni's `StagePool`, which asks when and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import zmq
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.engine.stage_pool import StagePool

from vllm_omni_sched.omni.stages.processes import let_go

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.names import Names
    from vllm_omni_sched.omni.stages.queue import StageQueue
    from vllm_omni_sched.omni.stages.work import Work

SEND_SECONDS = 1.0  # for a client to hand a request to the process of a diffusion replica


class ScheduledPool(StagePool):
    """A `StagePool` that was made one of ours; `queue` decides."""

    queue: StageQueue
    starting: set[str]  # still in hand if their submission fails
    at_once: int  # requests that a replica runs
    draining: set[int]  # replicas that get no new work, since they are to go
    suspected: set[int]  # replicas that get no new work, since they hang
    names: Names | None = None  # of runs, where requests run again under new ones

    async def submit_initial(
        self,
        request_id: str,
        req_state: Any,
        request: Any,
        *,
        prompt_text: Any = None,
        affinity_request_id: str | None = None,
        submit_kwargs: dict[str, Any] | None = None,
        params_override: Any = None,
    ) -> int:
        """As vLLM-Omni's, but the request may wait, or share the work of another one.

        Returns:
            Its replica, or `UNPLACED`.
        """
        how = {
            "prompt_text": prompt_text,
            "affinity_request_id": affinity_request_id,
            "submit_kwargs": submit_kwargs,
            "params_override": params_override,
        }
        if affinity_request_id is not None or req_state.streaming.enabled or req_state.session_owned:
            # a session has its replica, and a companion that of its parent: nothing to decide
            return await super().submit_initial(request_id, req_state, request, **how)
        return await self.queue.submit(request_id, req_state, request, how)

    async def run(self, work: Work) -> int:
        """Submit it to the replica that was chosen."""
        self._request_bindings[work.request_id] = work.replica_id
        self.starting.add(work.request_id)
        try:
            return await super().submit_initial(work.request_id, work.state, work.request, **work.how)
        except zmq.Again as error:
            raise EngineDeadError("it takes no requests any more") from error
        finally:
            self.starting.discard(work.request_id)

    def select_replica_id(self, request_id: str, *, affinity_request_id: str | None = None) -> int:
        """As vLLM-Omni's, but a request that is bound to none goes where the balancer says."""
        if self.get_bound_replica_id(request_id) is None and affinity_request_id is None:
            chosen = self.queue.choose_now(request_id)
            if chosen is not None:
                self._request_bindings[request_id] = chosen
        return super().select_replica_id(request_id, affinity_request_id=affinity_request_id)

    async def abort_requests(self, request_ids: list[str]) -> list[tuple[str, Any]]:
        """As vLLM-Omni's, but work that is also others' goes on."""
        return await super().abort_requests([one for one in request_ids if not self.queue.works_for_others(one)])

    def release_binding(self, request_id: str) -> None:
        super().release_binding(request_id)
        if request_id not in self.starting:
            self.queue.left(request_id)

    async def abort_orphan(self, request_id: str, replica_id: int) -> None:
        """Stop a work that nobody wants any more, of a request that is gone already."""
        self._request_bindings[request_id] = replica_id
        try:
            await super().abort_requests([request_id])
        finally:
            self.release_binding(request_id)

    def bound_sends(self, seconds: float = SEND_SECONDS) -> None:
        """Let nothing wait longer than this to send to a diffusion replica.

        Its client sends without a time limit, in the loop of the orchestrator, and nobody takes what is sent to a
        process that has died: the whole pipeline would stand still.
        """
        for client in self.clients:
            socket = getattr(client, "_request_socket", None)
            if socket is not None:
                socket.setsockopt(zmq.SNDTIMEO, int(1e3 * seconds))

    def evict_replica(self, replica_id: int) -> None:
        """As vLLM-Omni's, which sends the replica a last word, dead or not; what its client still holds is closed."""
        client = self.clients[replica_id]
        self.bound_sends(0)
        try:
            super().evict_replica(replica_id)
        finally:
            self.bound_sends()
            let_go(client)

    def attach(self, replica_id: int, client: Any) -> None:
        """A replica is back, or is new."""
        if self.names is not None:
            self.names.put_on(client)
        gone = [address for address, one in self._addr_to_replica_id.items() if self.clients[one] is None]
        for address in gone:  # it may be used again, by any
            del self._addr_to_replica_id[address]
        self.add_client(self._client_input_addr(client) or f"replica {replica_id}", client, replica_id=replica_id)
        self.suspected.discard(replica_id)
        self.bound_sends()

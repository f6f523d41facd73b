"""Extend vLLM-Omni's `StagePool` with a queue that decides when and where requests run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import zmq
from vllm_omni.engine.stage_pool import StagePool

from vllm_omni_sched.omni.stages.reports.processes import ReplicaDeadError, processes_of, release_client
from vllm_omni_sched.omni.stages.start.capacity import max_num_seqs_of

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.queue import StageQueue
    from vllm_omni_sched.omni.stages.recovery.run_names import RunNames
    from vllm_omni_sched.omni.stages.work import Work

SEND_SECONDS = 1.0  # for a client to send a request to the process of a diffusion replica


class PoolMembership(Protocol):
    """Is told of replicas that come and go without our doing; the orchestrator implements it."""

    def joined(self, pool: ScheduledPool, replica_id: int) -> None:
        """Record that a replica was added."""

    def when_examined(self, pool: ScheduledPool, replica_id: int, do: Callable[[], None]) -> None:
        """Do something at once, or when it is known what was lost with the process that had this number before."""

    def silent(self, pool: ScheduledPool, replica_id: int, address: str) -> None:
        """Take a replica out of the pool that is not reported any more."""


class ScheduledPool(StagePool):
    """Adds a queue to vLLM-Omni's `StagePool`, which decides when and where requests run.

    Args:
        max_num_seqs: requests that a replica runs at once.
        original: the arguments of `StagePool`.
    """

    queue: StageQueue  # set by `attach_queue`, before the first request

    def __init__(self, *arguments: Any, max_num_seqs: int, **original: Any) -> None:
        super().__init__(*arguments, **original)
        self.max_num_seqs = max_num_seqs
        self.starting: set[str] = set()  # requests that are still owned by the pool if their submission fails
        self.draining: set[int] = set()  # replicas that get no new work because they are being drained
        self.suspected: set[int] = set()  # replicas that get no new work because they hang
        self.names: RunNames | None = None  # names of runs, if requests run again under new names
        self.membership: PoolMembership | None = None  # set by the orchestrator
        self._attaching: set[int] = set()  # replicas that are being added from here
        self._master: Any = None  # vLLM-Omni's `OmniMasterServer`, if stages run on several hosts
        self.bound_sends()

    @classmethod
    def rebuild(cls, pool: StagePool, runtime: Any) -> ScheduledPool:
        """Return a pool of ours for the same replicas; vLLM-Omni has built ``pool``, and nothing has used it yet.

        Args:
            pool: vLLM-Omni's pool.
            runtime: vLLM-Omni's `StageRuntime`, which built it.
        """
        rebuilt = cls(
            pool.stage_id,
            list(pool.clients),
            output_processor=pool.output_processor,
            stage_vllm_config=pool.stage_vllm_config,
            max_num_seqs=max_num_seqs_of(pool, runtime),
        )
        rebuilt._master = getattr(runtime, "_omni_master_server", None)
        rebuilt.attach_hub(pool._hub)
        rebuilt.attach_load_balancer(pool._lb)
        return rebuilt

    def use_run_names(self, names: RunNames) -> None:
        """Give runs of requests names of their own in all replicas, also in those that are attached later."""
        self.names = names
        for client in self.clients:
            if client is not None:
                names.wrap_client(client)

    def attach_queue(self, queue: StageQueue) -> None:
        """Set the queue, as vLLM-Omni attaches its load balancer: it needs the orchestrator, which needs this pool."""
        self.queue = queue

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
        """Submit a request like vLLM-Omni, except that it may wait or share the work of another one.

        Returns:
            Its replica, or `UNPLACED`.
        """
        submit_args = {
            "prompt_text": prompt_text,
            "affinity_request_id": affinity_request_id,
            "submit_kwargs": submit_kwargs,
            "params_override": params_override,
        }
        if affinity_request_id is not None or req_state.streaming.enabled or req_state.session_owned:
            # a session stays on its replica, and a companion on that of its parent: nothing to decide
            return await super().submit_initial(request_id, req_state, request, **submit_args)
        return await self.queue.submit(request_id, req_state, request, submit_args)

    async def run(self, work: Work) -> int:
        """Submit a work to the chosen replica."""
        client = self.clients[work.replica_id]
        self._request_bindings[work.request_id] = work.replica_id
        self.starting.add(work.request_id)
        try:
            return await super().submit_initial(work.request_id, work.state, work.request, **work.submit_args)
        except zmq.Again as error:
            raise ReplicaDeadError(client, "it did not accept a request in time") from error
        finally:
            self.starting.discard(work.request_id)

    def select_replica_id(self, request_id: str, *, affinity_request_id: str | None = None) -> int:
        """Select a replica like vLLM-Omni, except that the balancer chooses for a request that is bound to none."""
        if self.get_bound_replica_id(request_id) is None and affinity_request_id is None:
            chosen = self.queue.choose_now(request_id)
            if chosen is not None:
                self._request_bindings[request_id] = chosen
        return super().select_replica_id(request_id, affinity_request_id=affinity_request_id)

    async def pick(self, request_id: str, task: Any = None, *, affinity_request_id: str | None = None) -> int:
        """Select a replica as on one host; vLLM-Omni's balancer of several hosts only waits for the first replica."""
        if self.available_replica_ids():
            return self.select_replica_id(request_id, affinity_request_id=affinity_request_id)
        return int(await super().pick(request_id, task, affinity_request_id=affinity_request_id))

    def preselect_replica_id(
        self, request_id: str, task: Any = None, *, affinity_request_id: str | None = None
    ) -> int | None:
        """Select a replica before the request is prepared, as on one host; None without one."""
        if self.available_replica_ids():
            return self.select_replica_id(request_id, affinity_request_id=affinity_request_id)
        return super().preselect_replica_id(request_id, task, affinity_request_id=affinity_request_id)

    def host_of(self, replica_id: int, client: Any) -> str:
        """Return the address of the host of a replica; "" if it is that of the front end."""
        if self._master is None or any(True for _ in processes_of(client)):
            return ""
        host = self._master.get_replica_host(self.stage_id, replica_id)
        return "" if host in (None, self._master.address) else str(host)

    def hosts(self) -> dict[int, str]:
        """Return the hosts of the replicas that are not on that of the front end."""
        found = {one: self.host_of(one, self.clients[one]) for one in self.live_replica_ids()}
        return {one: host for one, host in found.items() if host}

    async def abort_requests(self, request_ids: list[str]) -> list[tuple[str, Any]]:
        """Abort requests like vLLM-Omni, except that work that other requests need goes on."""
        return await super().abort_requests([one for one in request_ids if not self.queue.works_for_others(one)])

    def release_binding(self, request_id: str) -> None:
        super().release_binding(request_id)
        if request_id not in self.starting:
            self.queue.drop(request_id)

    async def abort_orphan(self, request_id: str, replica_id: int) -> None:
        """Stop a work that no request needs any more, after its own request has left."""
        self._request_bindings[request_id] = replica_id
        try:
            await super().abort_requests([request_id])
        finally:
            self.release_binding(request_id)

    def bound_sends(self, seconds: float = SEND_SECONDS) -> None:
        """Limit the time of sends to diffusion replicas.

        Their client sends without a time limit, in the event loop of the orchestrator, and a dead process does not
        receive: the whole pipeline would stop.
        """
        for client in self.clients:
            socket = getattr(client, "_request_socket", None)
            if socket is not None:
                socket.setsockopt(zmq.SNDTIMEO, int(1e3 * seconds))

    def evict_replica(self, replica_id: int) -> None:
        """Evict a replica like vLLM-Omni, which sends it a last message, dead or not; then close its client."""
        client = self.clients[replica_id]
        self.bound_sends(0)
        try:
            super().evict_replica(replica_id)
        finally:
            self.queue.replica_down(replica_id)
            self.bound_sends()
            release_client(client)

    def add_client(self, input_addr: str, client: Any, *, replica_id: int | None = None, cause: str = "") -> int:
        """Add a replica; if another process has its number, that one is gone."""
        if self.names is not None:
            self.names.wrap_client(client)
        if replica_id is not None and replica_id in self.live_replica_ids():
            before = self.clients[replica_id]
            if self.membership is not None and before is not client:
                self.membership.silent(self, replica_id, self._client_input_addr(before) or "")
        added: int = super().add_client(input_addr, client, replica_id=replica_id)
        self.suspected.discard(added)
        up = partial(self._up, added, client, cause, added in self._attaching)
        if self.membership is None:
            up()
        else:
            self.membership.when_examined(self, added, up)
        return added

    def _up(self, replica_id: int, client: Any, cause: str, ours: bool) -> None:
        if self.clients[replica_id] is not client:
            return  # it has died meanwhile
        host = self.host_of(replica_id, client)
        self.queue.replica_up(replica_id, cause or (f"on host {host}" if host else ""), host)
        if self.membership is not None and not ours:
            self.membership.joined(self, replica_id)

    def remove_client(self, input_addr: str) -> Any | None:
        """Remove a replica that vLLM-Omni's coordinator no longer reports.

        Returns:
            Its client, which the caller closes; None if there is none, or if our orchestrator keeps it.
        """
        replica_id = self.get_replica_id_by_addr(input_addr)
        if replica_id is None or self.clients[replica_id] is None:
            return None
        if self.membership is not None:
            self.membership.silent(self, replica_id, input_addr)
            return None
        client = super().remove_client(input_addr)
        self.queue.replica_down(replica_id)
        return client

    def mark_replica_unavailable(self, replica_id: int) -> list[str]:
        requests: list[str] = super().mark_replica_unavailable(replica_id)
        self.queue.replica_down(replica_id)
        return requests

    def detach(self, replica_id: int) -> None:
        """Take a replica out of service without stopping it; it gets no calls any more."""
        self.clients[replica_id] = None
        self.queue.replica_down(replica_id)

    def drain(self, replica_id: int, *, on: bool = True, cause: str = "") -> None:
        """Give a replica no work that was not prepared for it; or let it have work again."""
        (self.draining.add if on else self.draining.discard)(replica_id)
        self.queue.replica_draining(replica_id, on, cause)

    def suspect(self, *replica_ids: int, on: bool = True, cause: str = "") -> None:
        """Give replicas that hang no work; or let them have work again."""
        (self.suspected.update if on else self.suspected.difference_update)(replica_ids)
        self.queue.replicas_suspected(replica_ids, on, cause)

    def attach(self, replica_id: int, client: Any, cause: str = "") -> None:
        """Add the client of a replica that was restarted or is new.

        Raises:
            ValueError: the replica has a client; what that runs would be lost without a word.
        """
        if replica_id in self.live_replica_ids():
            raise ValueError(f"stage {self.stage_id} replica {replica_id} serves; no other process can take its place")
        gone = [address for address, one in self._addr_to_replica_id.items() if self.clients[one] is None]
        for address in gone:  # an address may be reused by any replica
            del self._addr_to_replica_id[address]
        address = self._client_input_addr(client) or f"replica {replica_id}"
        self._attaching.add(replica_id)
        try:
            self.add_client(address, client, replica_id=replica_id, cause=cause)
        finally:
            self._attaching.discard(replica_id)
        self.bound_sends()

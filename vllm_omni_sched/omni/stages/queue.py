"""Pass what happens in a stage of vLLM-Omni to the pipeline core, and carry out its actions."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.graph.merging import Merger
from vllm_omni_sched.omni.stages.work import UNPLACED, Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.pipeline_driver import PipelineDriver
    from vllm_omni_sched.omni.stages.pool import ScheduledPool


class QueueHooks(Protocol):
    """Receives what the queue of a stage leaves to others; the orchestrator implements it."""

    def describe(
        self, pool: ScheduledPool, request_id: str, state: Any, request: Any, submit_args: dict[str, Any], now: float
    ) -> Work:
        """Describe a submission by vLLM-Omni."""

    def leads(self, pool: ScheduledPool, work: Work) -> None:
        """Get the input of a request that does its own work."""

    def inherited(self, owner: str, heir: Work) -> None:
        """Let a request wait in the place of one that has left."""

    def start(self, pool: ScheduledPool, work: Work) -> Awaitable[None]:
        """Send work to its replica, and handle a dead one."""


class StageQueue:
    """Passes calls of vLLM-Omni for one stage to the core as events, and turns actions into submissions and metrics.

    The rules are those of `StageScheduler`.

    Args:
        pool: pool of the stage.
        driver: the driver of the pipeline, which all stages share.
        async_chunk: all stages of a request run under one name (async-chunk mode); no other request can take its place.
    """

    def __init__(
        self,
        pool: ScheduledPool,
        driver: PipelineDriver,
        hooks: QueueHooks,
        clock: Callable[[], float],
        async_chunk: bool = False,
    ) -> None:
        self.pool, self._driver, self._hooks, self._clock = pool, driver, hooks, clock
        self._stage_id: int = pool.stage_id
        self.stage = driver.core.add_stage(
            pool.stage_id, pool.max_num_seqs, pool.available_replica_ids(), async_chunk, pool.hosts()
        )
        driver.queues[pool.stage_id] = self
        self._starts: deque[tuple[Work, int]] = deque()  # works to send, and the numbers of their runs
        self._sending = False

    # ---- present requests

    @property
    def waiting(self) -> Mapping[str, Work]:
        """Return the works that wait, by request."""
        return cast("Mapping[str, Work]", self.stage.waiting)

    @property
    def running(self) -> Mapping[str, Work]:
        """Return the works that run, by the request that they were begun for."""
        return cast("Mapping[str, Work]", self.stage.running)

    @property
    def merger(self) -> Merger:
        """Return the groups of requests that share work."""
        return self.stage.merger

    def has_work(self, request_id: str) -> bool:
        """Return whether a work that was begun for the request waits or runs here."""
        return request_id in self.stage.waiting or request_id in self.stage.running

    def receivers(self, request_id: str) -> tuple[str, ...]:
        """Return the requests that get the outputs of a work that was begun for ``request_id``."""
        return self.stage.receivers(request_id)

    def leader_of(self, request_id: str) -> str:
        """Return the request for which the work was begun whose output ``request_id`` gets here."""
        return self.stage.leader_of(request_id)

    @property
    def has_waiting(self) -> bool:
        """Return whether works wait, or have started and are not sent."""
        return bool(self.stage.waiting or self._starts)

    def works_for_others(self, request_id: str) -> bool:
        """Return whether the work that was begun for a request is now needed only by others."""
        return self.stage.works_for_others(request_id)

    # ---- events

    def handle(self, event: e.Event) -> list[e.Action]:
        """Pass an event to the core; what can be done at once is done. Works that start are sent by `send`."""
        actions = self._driver.handle(event, now := self._clock())
        for action in actions:
            self._driver.do(action, now, self)
        return actions

    def do(self, action: e.Action, now: float) -> None:
        """Carry out an action, except for sending."""
        board, stage_id = self._driver.board, self._stage_id
        match action:
            case e.Start(Work() as work, _, warm):
                self._starts.append((work, work.runs))
                load = self.stage.replicas[work.replica_id].load
                board.submitted(stage_id, work.replica_id, work.request_id, work.arrived)
                board.started(stage_id, work.replica_id, work.request_id, now)
                board.batch(stage_id, work.replica_id, len(load))
                limit = load.max_num_seqs if load.control is None else load.control.limit
                board.batch_limit(stage_id, work.replica_id, limit)
                if warm is not None:
                    board.looked_up(stage_id, work.replica_id, warm)
            case e.Follow():
                board.merged(stage_id)
            case e.Ended(Work() as work, _, True):
                board.finished(stage_id, work.replica_id, work.request_id, now)
                self._record_credits()
            case e.Ended(Work() as work):
                board.aborted(stage_id, work.replica_id, work.request_id)
                self._record_credits()
            case e.Gone(Work() as work):
                board.aborted(stage_id, work.replica_id, work.request_id)
                self._record_credits()
            case e.Lost(_, replica_id):
                board.redispatched(stage_id, replica_id)
            case e.Inherited(owner, Work() as heir):
                self._hooks.inherited(owner, heir)
            case _:
                pass  # `Wake`: all stages are asked often enough; others are answers to questions

    def _record_credits(self) -> None:
        credits = self._driver.context.credits
        if credits is not None:
            self._driver.board.credits(self._stage_id, credits.free(str(self._stage_id)))

    async def send(self) -> None:
        """Send the works that start, in order; one that was lost meanwhile is not sent."""
        if self._sending:
            return  # this is being done, and goes on until there are none
        self._sending = True
        try:
            while self._starts:
                work, run = self._starts.popleft()
                if self.stage.running.get(work.request_id) is work and work.runs == run and not work.sent:
                    await self._hooks.start(self.pool, work)
        finally:
            self._sending = False

    async def release(self) -> None:
        """Start all works that can start now."""
        self.handle(e.Tick(self._stage_id))
        await self.send()

    async def submit(self, request_id: str, state: Any, request: Any, submit_args: dict[str, Any]) -> int:
        """Submit a request that has come to the stage; return its replica, or `UNPLACED`."""
        work = self._hooks.describe(self.pool, request_id, state, request, submit_args, self._clock())
        work.bound = self.pool.get_bound_replica_id(request_id)
        for action in self.handle(e.Submitted(work, work.known.features[self._stage_id])):
            if isinstance(action, e.Lead):
                if not action.again:
                    self._hooks.leads(self.pool, work)
                await self.wait(work)
        return work.replica_id if work.sent else UNPLACED

    async def wait(self, work: Work) -> None:
        """Queue a work, and start the works that can start."""
        work.bound = self.pool.get_bound_replica_id(work.request_id)
        self.handle(e.Waits(work))
        await self.send()

    def take_out(self, request_id: str) -> Work | None:
        """Remove the waiting work of a request and return it; None if there is none."""
        work = self.waiting.get(request_id)
        self.handle(e.TakenOut(self._stage_id, request_id))
        return work

    def hold(self, request_id: str) -> None:
        """Keep a request in the queue until `resume`."""
        self.handle(e.Held(self._stage_id, request_id))

    def resume(self, request_id: str) -> None:
        """Allow a held request to be released; others are ignored."""
        self.handle(e.Resumed(self._stage_id, request_id))

    def regroup(self, request_id: str, receivers: Sequence[str]) -> None:
        """Form a group again for a work that has ended here and is to run again, for all receivers of its output."""
        self.handle(e.Regrouped(self._stage_id, request_id, tuple(receivers)))

    def withdraw(self, work: Work) -> bool:
        """Stop a running work so that it can run again with its followers; return whether it was running here."""
        if self.stage.running.get(work.request_id) is not work:
            return False
        self.handle(e.Withdrawn(self._stage_id, work.request_id))
        return True

    def rename(self, request_id: str) -> None:
        """Record that the work begun for a request no longer runs: its present leader will run under its own name."""
        self.handle(e.Renamed(self._stage_id, request_id))

    def choose_now(self, request_id: str) -> int | None:
        """Choose a replica for a request that does not come through the queue; vLLM-Omni may call from any thread."""
        for action in self._driver.handle(e.Asked(self._stage_id, request_id), self._clock()):
            if isinstance(action, e.Chosen):
                return action.replica_id
        return None

    def on_first_output(self, request_id: str) -> bool:
        """Record an output of a work; return whether its first one may make room for waiting requests."""
        work = self.stage.running.get(request_id)
        if work is None or work.has_output:
            return False
        self._driver.measure_memory(self._clock())
        self.handle(e.FirstOutput(self._stage_id, request_id))
        return bool(self.stage.waiting)

    def finished(self, request_id: str, succeeded: bool = True) -> None:
        """Record that a work has ended; ``succeeded``: without an error."""
        self._driver.measure_memory(self._clock())
        self.handle(e.Finished(self._stage_id, request_id, succeeded))

    def detach(self, request_id: str) -> Work | None:
        """Remove a request that is aborted or failed; call it before its work is aborted.

        Returns:
            A running work that was begun for a request that has left, and that no request needs any more.
        """
        if not self.stage.knows(request_id):
            return None
        found = self.handle(e.Detached(self._stage_id, request_id))
        return next((one.work for one in found if isinstance(one, e.Stop) and isinstance(one.work, Work)), None)

    def drop(self, request_id: str) -> None:
        """Remove a request that has left this stage; work begun for it goes on only for others."""
        if self.stage.knows(request_id):
            self.handle(e.Dropped(self._stage_id, request_id))

    def lost(self, replica_id: int, cause: str = "") -> list[Work]:
        """Return the works that a dead replica had; works that it never got wait again."""
        found = self.handle(e.ReplicaDied(self._stage_id, replica_id, cause))
        self._driver.board.lost(self._stage_id, replica_id)
        return [one.work for one in found if isinstance(one, e.Lost) and not one.waits and isinstance(one.work, Work)]

    # ---- replicas

    def replica_up(self, replica_id: int, cause: str = "", host: str = "") -> None:
        """Record that a replica is new or was restarted. ``host``: if it is another one than that of the front end."""
        self.handle(e.ReplicaUp(self._stage_id, replica_id, cause, host))

    def replica_down(self, replica_id: int) -> None:
        """Record that a replica takes no requests any more."""
        self.handle(e.ReplicaDown(self._stage_id, replica_id))

    def replica_gone(self, replica_id: int) -> None:
        """Record that a replica was stopped on purpose."""
        self.handle(e.ReplicaGone(self._stage_id, replica_id))
        self._driver.board.lost(self._stage_id, replica_id)

    def replica_draining(self, replica_id: int, on: bool, cause: str = "") -> None:
        """Record that a replica is being drained, or no longer."""
        self.handle(e.ReplicaDraining(self._stage_id, replica_id, on, cause))

    def replicas_suspected(self, replica_ids: Iterable[int], on: bool, cause: str = "") -> None:
        """Record that replicas seem to hang, or answer again."""
        for replica_id in replica_ids:
            self.handle(e.ReplicaSuspected(self._stage_id, replica_id, on, cause))

"""Queue of a stage: which request runs next, on which replica, and which requests share work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm_omni_sched.graph.merging import Merger, Role
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.stages.stage_policies import StagePolicies
from vllm_omni_sched.omni.stages.work import UNPLACED, Work

logger = get_logger(__name__)


class StageQueue:
    """Requests of one stage: waiting, running, or following one of these.

    1. A request whose work is already in flight follows it, and gets copies of the outputs.
    2. Otherwise it waits until the policies release it to a replica.
    3. Work goes on while any request needs it: when the request it was begun for leaves, its followers keep it.

    Args:
        pool: pool of the stage.
        policies: policies of the stage.
        describe: makes a `Work` of a submission by vLLM-Omni.
        start: sends a work to its replica, and handles dead replicas.
        together: all stages of a request run under one name (async-chunk mode); no other request can take its place.
    """

    def __init__(
        self,
        pool: Any,
        policies: StagePolicies,
        describe: Callable[..., Work],
        start: Callable[[Any, Work], Awaitable[None]],
        clock: Callable[[], float],
        together: bool = False,
    ) -> None:
        self.pool, self.policies = pool, policies
        self._describe, self._start, self._clock = describe, start, clock
        self._together = together
        self.merger: Merger = policies.merger()
        self.joined: Callable[[Work], None] = lambda work: None
        self.ended: Callable[[Work], None] = lambda work: None
        self.leads: Callable[[Work], None] = lambda work: None
        self.inherited: Callable[[str, Work], None] = lambda owner, heir: None
        self.waiting: dict[str, Work] = {}
        self.running: dict[str, Work] = {}  # by the request it was begun for
        self._parked: dict[str, Work] = {}  # followers
        self._serves: dict[str, str] = {}  # request it was begun for -> present leader, if another one
        self.held: set[str] = set()  # requests that wait for a payload of their own
        self._releasing = False

    async def submit(self, request_id: str, state: Any, request: Any, how: dict[str, Any]) -> int:
        """Submit a request that has come to the stage."""
        now = self._clock()
        work = self._describe(self.pool, request_id, state, request, how, now)
        if self.merger.members(request_id):  # it comes again, after a death, and keeps its followers
            await self.wait(work)
            return work.replica_id
        joined = self.merger.join(work.key, request_id)
        self.policies.came(work, joined, now)
        if joined.role is Role.FOLLOW:
            self._parked[request_id] = work
            self.joined(work)
            return UNPLACED
        self.leads(work)
        await self.wait(work)
        return work.replica_id

    async def wait(self, work: Work) -> None:
        """Queue a work, and release the works that may start."""
        self._lead(work)
        self._put(work)
        await self.release()

    def _put(self, work: Work) -> None:
        self.waiting[work.request_id] = work
        if work.request_id not in self.held:
            self.policies.waits(self.pool, work, self._clock())

    def take_out(self, request_id: str) -> Work | None:
        """Remove the waiting work of a request and return it; None if there is none."""
        self.policies.waits_no_more(request_id)
        return self.waiting.pop(request_id, None)

    def hold(self, request_id: str) -> None:
        """Keep a request in the queue until `let_go`."""
        self.held.add(request_id)
        self.policies.waits_no_more(request_id)

    def let_go(self, request_id: str) -> None:
        """Allow a held request to be released; others are ignored."""
        if request_id not in self.held:
            return
        self.held.remove(request_id)
        if request_id in self.waiting:
            self.policies.waits(self.pool, self.waiting[request_id], self._clock())

    async def release(self) -> None:
        """Start all works that the policies release now."""
        if self._releasing or not self.waiting:
            return
        self._releasing = True
        try:
            while batch := self._next():
                for work in batch:
                    if self.running.get(work.request_id) is work and work.replica_id != UNPLACED:
                        await self._start(self.pool, work)
        finally:
            self._releasing = False

    def _next(self) -> list[Work]:
        now, released = self._clock(), []
        for request_id, replica_id in self.policies.release(self.pool, now):
            work = self.waiting.pop(request_id)
            self._begin(work, replica_id)
            released.append(work)
        return released

    async def place(self, work: Work, replica_id: int) -> None:
        """Start a work on a replica without queueing; it has waited before."""
        self._lead(work)
        self._begin(work, replica_id)
        await self._start(self.pool, work)

    def _lead(self, work: Work) -> None:
        """Form a group for a work that comes again after its group has ended here."""
        if not self.merger.members(work.request_id) and work.request_id not in self._serves:
            self.merger.join(None, work.request_id)

    def regroup(self, request_id: str, receivers: Sequence[str]) -> None:
        """Form a group again for a work that has ended here and is to run again, for all receivers of its output."""
        if self.merger.members(self._serves.get(request_id, request_id)):
            return  # it has not ended here
        self.merger.regroup(receivers[0], receivers[1:])
        if receivers[0] != request_id:
            self._serves[request_id] = receivers[0]

    def has(self, request_id: str) -> bool:
        """Return whether a work that was begun for the request waits or runs here."""
        return request_id in self.waiting or request_id in self.running

    def withdraw(self, work: Work) -> bool:
        """Stop a running work so that it can run again with its followers; return whether it was running here."""
        if self.running.get(work.request_id) is not work:
            return False
        del self.running[work.request_id]
        now = self._clock()
        self.policies.load(work.replica_id).end(work.request_id, now)
        self.policies.lost(work, now)
        work.replica_id, work.started, work.spoke = UNPLACED, None, False
        return True

    def rename(self, request_id: str) -> None:
        """Record that the work begun for a request no longer runs: its present leader will run under its own name."""
        self._serves.pop(request_id, None)

    def _begin(self, work: Work, replica_id: int) -> None:
        work.replica_id, work.started, work.runs = replica_id, self._clock(), work.runs + 1
        work.sent = False
        self.running[work.request_id] = work
        self.policies.began(work)

    def choose_now(self, request_id: str) -> int | None:
        """Choose a replica for a request that does not come through the queue."""
        return self.policies.choose(self.pool, None, self.running)

    def receivers(self, request_id: str) -> tuple[str, ...]:
        """Return the requests that get the outputs of a work that was begun for ``request_id``."""
        leader = self._serves.get(request_id, request_id)
        return self.merger.members(leader) or (request_id,)

    def leader_of(self, request_id: str) -> str:
        """Return the request for which the work was begun whose output ``request_id`` gets here."""
        leader = self.merger.leader(request_id)
        return next((began for began, leads in self._serves.items() if leads == leader), leader)

    def works_for_others(self, request_id: str) -> bool:
        """Return whether the work that was begun for a request is now needed only by others."""
        return request_id in self._serves

    def finished(self, request_id: str, well: bool = True) -> None:
        """Record that a work has ended; ``well``: without an error."""
        now = self._clock()
        leader = self._serves.pop(request_id, request_id)
        for follower in self.merger.finish(leader):
            self._parked.pop(follower, None)
        work = self.running.pop(request_id, None)
        if work is not None:
            (self.policies.finished if well else self.policies.gone)(work, now)
            self.ended(work)

    def spoke(self, request_id: str) -> bool:
        """Record an output of a work; return whether its first one may make room for waiting requests."""
        work = self.running.get(request_id)
        if work is None or work.spoke:
            return False
        work.spoke = True
        self.policies.spoke(work, self._clock())
        return bool(self.waiting)

    def leaves(self, request_id: str) -> Work | None:
        """Remove a request that is aborted or failed; call it before its work is aborted.

        Returns:
            A running work that was begun for a request that has left, and that no request needs any more.
        """
        left = self.merger.leave(request_id)
        if left.promoted is not None:
            began = next((name for name, leader in self._serves.items() if leader == request_id), request_id)
            heir = self._parked.pop(left.promoted, None)
            if heir is None or began in self.running or self._together:
                self._serves[began] = left.promoted
            else:
                self.take_out(began)
                self._put(heir)
                self.inherited(began, heir)
            return None
        orphan = next((name for name, leader in self._serves.items() if leader == request_id), None)
        if orphan is not None:  # the last request that needed it
            del self._serves[orphan]
        self._parked.pop(request_id, None)
        if orphan is None:
            return None
        self.take_out(orphan)
        return self.running.get(orphan)

    def left(self, request_id: str) -> None:
        """Remove a request that has left this stage; work begun for it goes on only for others."""
        self._parked.pop(request_id, None)
        if request_id in self._serves:
            return
        self.take_out(request_id)
        if request_id in self.running:
            self.policies.gone(self.running.pop(request_id), self._clock())
            self.merger.leave(request_id)

    def lost(self, replica_id: int) -> list[Work]:
        """Remove and return the works that ran on a dead replica."""
        lost = [work for work in self.running.values() if work.replica_id == replica_id]
        for work in lost:
            del self.running[work.request_id]
            self.policies.lost(work, self._clock())
            work.replica_id, work.started, work.spoke = UNPLACED, None, False
            if not work.sent:
                self._put(work)
        self.policies.died(replica_id)
        return [work for work in lost if work.sent]

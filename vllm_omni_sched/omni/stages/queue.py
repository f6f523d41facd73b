"""The queue before a stage: who runs next, where, and whose work is shared."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from vllm_omni_sched.graph.merging import Merger, Role
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.omni.stages.stage_policies import StagePolicies
from vllm_omni_sched.omni.stages.work import UNPLACED, Work

logger = get_logger(__name__)


class StageQueue:
    """Requests of one stage: waiting, running, or following one that does.

    1. A request whose work is in flight already follows; it gets copies of the outputs.
    2. Else it waits until the policies release it to a replica.
    3. Work goes on while anybody wants it: when the one it was begun for leaves, it is its followers'.

    Args:
        pool: the stage.
        policies: what decides.
        describe: makes a `Work` of what vLLM-Omni submits.
        start: hands a work to its replica; it copes with replicas that are dead.
        together: all stages of a request run under one name (async-chunk mode); then nobody else's can take its place.
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
        self.running: dict[str, Work] = {}  # by whom it was begun for
        self._parked: dict[str, Work] = {}  # followers
        self._serves: dict[str, str] = {}  # who was begun for -> who leads now, where that is another one
        self.held: set[str] = set()  # requests that wait for a payload of their own
        self._releasing = False

    async def submit(self, request_id: str, state: Any, request: Any, how: dict[str, Any]) -> int:
        """A request has come to the stage."""
        now = self._clock()
        work = self._describe(self.pool, request_id, state, request, how, now)
        if self.merger.members(request_id):  # it comes again, after a death, and is followed as before
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
        """Put a work into the queue, and release what may go."""
        self._lead(work)
        self._put(work)
        await self.release()

    def _put(self, work: Work) -> None:
        self.waiting[work.request_id] = work
        if work.request_id not in self.held:
            self.policies.waits(self.pool, work, self._clock())

    def take_out(self, request_id: str) -> Work | None:
        """What waits for a request, which waits no more; None if nothing does."""
        self.policies.waits_no_more(request_id)
        return self.waiting.pop(request_id, None)

    def hold(self, request_id: str) -> None:
        """A request is not to be released before `let_go`."""
        self.held.add(request_id)
        self.policies.waits_no_more(request_id)

    def let_go(self, request_id: str) -> None:
        """It may be released; nothing if it was not held."""
        if request_id not in self.held:
            return
        self.held.remove(request_id)
        if request_id in self.waiting:
            self.policies.waits(self.pool, self.waiting[request_id], self._clock())

    async def release(self) -> None:
        """Hand over all that the policies let go now."""
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
        """Start a work on a replica, past the queue: it has waited before."""
        self._lead(work)
        self._begin(work, replica_id)
        await self._start(self.pool, work)

    def _lead(self, work: Work) -> None:
        """One that comes again has lost its group if it had finished here."""
        if not self.merger.members(work.request_id) and work.request_id not in self._serves:
            self.merger.join(None, work.request_id)

    def regroup(self, request_id: str, receivers: Sequence[str]) -> None:
        """A work that has ended here is to run again, for all who get its output in any stage."""
        if self.merger.members(self._serves.get(request_id, request_id)):
            return  # it has not ended here
        self.merger.regroup(receivers[0], receivers[1:])
        if receivers[0] != request_id:
            self._serves[request_id] = receivers[0]

    def has(self, request_id: str) -> bool:
        """Whether a work that was begun for a request waits or runs here."""
        return request_id in self.waiting or request_id in self.running

    def withdraw(self, work: Work) -> bool:
        """Whether a work runs here; it is taken back, to run again from its start, and is followed as before."""
        if self.running.get(work.request_id) is not work:
            return False
        del self.running[work.request_id]
        now = self._clock()
        self.policies.load(work.replica_id).end(work.request_id, now)
        self.policies.lost(work, now)
        work.replica_id, work.started, work.spoke = UNPLACED, None, False
        return True

    def rename(self, request_id: str) -> None:
        """What was begun for a request is not run any more: whoever leads now will come in its own name."""
        self._serves.pop(request_id, None)

    def _begin(self, work: Work, replica_id: int) -> None:
        work.replica_id, work.started, work.runs = replica_id, self._clock(), work.runs + 1
        work.sent = False
        self.running[work.request_id] = work
        self.policies.began(work)

    def choose_now(self, request_id: str) -> int | None:
        """A replica for one that does not come through the queue."""
        return self.policies.choose(self.pool, None, self.running)

    def receivers(self, request_id: str) -> tuple[str, ...]:
        """Who gets the outputs of a work that was begun for a request."""
        leader = self._serves.get(request_id, request_id)
        return self.merger.members(leader) or (request_id,)

    def leader_of(self, request_id: str) -> str:
        """For whom the work was begun whose output a request gets here."""
        leader = self.merger.leader(request_id)
        return next((began for began, leads in self._serves.items() if leads == leader), leader)

    def works_for_others(self, request_id: str) -> bool:
        """Whether the work that was begun for a request is wanted by others, and by it no more."""
        return request_id in self._serves

    def finished(self, request_id: str, well: bool = True) -> None:
        """A work has ended."""
        now = self._clock()
        leader = self._serves.pop(request_id, request_id)
        for follower in self.merger.finish(leader):
            self._parked.pop(follower, None)
        work = self.running.pop(request_id, None)
        if work is not None:
            (self.policies.finished if well else self.policies.gone)(work, now)
            self.ended(work)

    def spoke(self, request_id: str) -> bool:
        """A work has put out something. Whether others that wait may have room now, which they have at its first."""
        work = self.running.get(request_id)
        if work is None or work.spoke:
            return False
        work.spoke = True
        self.policies.spoke(work, self._clock())
        return bool(self.waiting)

    def leaves(self, request_id: str) -> Work | None:
        """A request goes, aborted or failed; to be called before its work is aborted.

        Returns:
            A work that runs, was begun for a request that is gone already, and is now wanted by nobody.
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
        if orphan is not None:  # the last one that wanted it
            del self._serves[orphan]
        self._parked.pop(request_id, None)
        if orphan is None:
            return None
        self.take_out(orphan)
        return self.running.get(orphan)

    def left(self, request_id: str) -> None:
        """A request is gone from this stage; what it has begun goes on for others only."""
        self._parked.pop(request_id, None)
        if request_id in self._serves:
            return
        self.take_out(request_id)
        if request_id in self.running:
            self.policies.gone(self.running.pop(request_id), self._clock())
            self.merger.leave(request_id)

    def lost(self, replica_id: int) -> list[Work]:
        """What ran on a replica that is dead; it runs no more."""
        lost = [work for work in self.running.values() if work.replica_id == replica_id]
        for work in lost:
            del self.running[work.request_id]
            self.policies.lost(work, self._clock())
            work.replica_id, work.started, work.spoke = UNPLACED, None, False
            if not work.sent:
                self._put(work)
        self.policies.died(replica_id)
        return [work for work in lost if work.sent]

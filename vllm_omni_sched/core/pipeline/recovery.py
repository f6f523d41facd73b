"""Report deaths in the stages to the recovery policy, and move the interrupted work as it decides."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping

from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.core.pipeline.stage import StageScheduler
from vllm_omni_sched.graph.flow import RequestFlow, StagePhase
from vllm_omni_sched.monitor.recovery import events as r
from vllm_omni_sched.monitor.recovery.events import FailReason, Replica
from vllm_omni_sched.monitor.recovery.policy import Recovery


class PipelineRecovery:
    """Recovers the requests and replicas of a pipeline as `Recovery` decides.

    `Recovery` decides on entries and replicas; this class knows what they are in the stages.

    1. Work is dispatched when it starts, and answered when it ends. Requests that followed it are answered with it,
       and their output is held likewise.
    2. A death has two steps. `ReplicaDied` takes the work off the replica, which is suspected from then on. The driver
       finds out what else is lost, and with `DeathExamined` the policy decides.
    3. Work that resumes at its stage starts there, for all requests that need it. If an earlier stage has to run again,
       it does so in the name of the present leader. When that comes back to the interrupted stage, its followers still
       follow it. Its requests need no credits from then on: if one waited for them again, those that
       hold them might wait for it.
    4. If all stages of a request run at once, all of them run again: the interrupted one where the policy says, the
       others as they have room. Where stages branch, this holds for those that exchange chunks with the interrupted
       one.
    5. Where stages branch, a request has an entry in each stage. Interrupted work with its inputs starts at its stage;
       else it waits there for its inputs, and the stages that `RequestFlow` names run again, as they have room. If a
       sender died before its output arrived, the policy decides on the sender's entry.
    6. Requests in the queue of a stage without a replica fail as the policy says (rule 8 of `Recovery`).
    7. A request is given up at most once.

    Args:
        stages: the stages, by number; stages are added to it later.
        together: whether all stages of a request run at once.
        waive: waives the credits of a request.
        branches: whether stages form more than a line, so that a request may be in several of them.
    """

    def __init__(
        self,
        policy: Recovery,
        stages: Mapping[int, StageScheduler],
        together: bool,
        waive: Callable[[str, float], None],
        branches: bool = False,
    ) -> None:
        self.policy = policy
        self.works: dict[str, dict[int, StageWork]] = {}  # of present requests that have run or followed, by stage
        self.lost: dict[str, StageWork] = {}  # interrupted work until it runs again, by entry
        self._stages, self._together, self._waive = stages, together, waive
        self._branches = branches
        self._lacking: dict[str, dict[int, tuple[int, ...]]] = {}  # by entry: lost sources of stages that lack them
        self._given_up: set[str] = set()
        self._names: dict[tuple[int, int], Replica] = {}
        self._empty_since: dict[int, float] = {}  # stages without a replica
        self._starting: Counter[int] = Counter()  # new replicas that are being started, by stage
        self._due = self._wake_at = math.inf
        self._replicas_changed = False
        self._found: list[e.Action] = []

    def entry(self, stage_id: int, request_id: str) -> str:
        """Return the name of a request's entry in the policy: if it can be in several stages, it has one in each."""
        return f"{request_id}@{stage_id}" if self._together or self._branches else request_id

    def works_of(self, request_id: str) -> dict[int, StageWork]:
        """Return the works of a present request that have run or followed others, by stage."""
        return self.works.get(request_id, {})

    def is_waiting(self, request_id: str) -> bool:
        """Return whether work of a request was interrupted and waits for a replica."""
        return any(work.request_id == request_id for work in self.lost.values())

    def restarts_together(self, work: StageWork) -> bool:
        """Return whether other stages of the request run again with this work, as they exchange chunks."""
        flow = work.known.flow
        return self._together or (flow is not None and work.stage_id in flow.plan.chunk_groups)

    def _exchanges_chunks(self, stage_id: int, request_id: str) -> bool:
        work = self.works.get(request_id, {}).get(stage_id)
        return work is not None and self.restarts_together(work)

    # ---- events

    def after(self, event: e.Event, actions: list[e.Action], now: float) -> list[e.Action]:
        """Return what follows from an event and from the actions that it has led to."""
        found = self._found = []
        for action in actions:
            match action:
                case e.Start(work):
                    self._dispatched(work, work.replica_id, now)
                case e.Ended(work, receivers, ok):
                    self._ended(work, receivers if ok else (), now)
                case e.Follow(work):
                    self.track(work)
                case e.Gone(work):
                    self._tell(r.Aborted(self.entry(work.stage_id, work.request_id)), now)
                case _:
                    pass
        if not isinstance(event, _OFTEN):
            self._happened(event, actions, now)
        if self._replicas_changed:
            self._replicas_changed = False
            self._plan_wake(now, min(self.policy.next_wake(), self._next_unserved()))
        return found

    def forget(self, request_id: str, now: float) -> list[e.Action]:
        """Forget a request of which no work goes on; return `Forgotten`, and what can run in its place."""
        self._given_up.discard(request_id)
        works = tuple(self.works.pop(request_id, {}).values())
        self._found = [e.Forgotten(request_id, works)]
        for name in dict.fromkeys(self.entry(work.stage_id, request_id) for work in works):
            self.lost.pop(name, None)
            self._lacking.pop(name, None)
            self._tell(r.Aborted(name), now)
        return self._found

    def _happened(self, event: e.Event, actions: list[e.Action], now: float) -> None:
        match event:
            case e.Tick(None):
                if now >= self._due:
                    self._tell(r.Tick(), now)
                if self._empty_since:
                    self._fail_unserved(now)
            case e.Woken(None, at):
                if at == self._wake_at:
                    self._wake_at = math.inf
                    self._tell(r.Tick(), now)
                    self._fail_unserved(now)
            case e.Waits(work):
                if work.stage_id in self._empty_since:
                    self._came_to_empty_stage(work, now)
            case e.Withdrawn(stage_id, request_id):
                if self._together or self._exchanges_chunks(
                    stage_id, request_id
                ):  # with the interrupted work of its request
                    self._tell(r.Aborted(self.entry(stage_id, request_id)), now)
                elif self._branches:
                    self._tell(r.Unsent(self.entry(stage_id, request_id)), now)
            case e.InputsLost(stage_id, request_id, sources) if self._branches:
                entry = self.entry(stage_id, request_id)
                everything = _flow(self.lost[entry]).plan.sources[stage_id]
                self._lack(entry, stage_id, everything if sources is None else sources)
            case e.InputsLost(stage_id, request_id):
                for earlier in range(stage_id):
                    self._tell(r.OutputLost(self.entry(stage_id, request_id), earlier), now)
            case e.Recalled(work, stage_id, replica_id, sources) if self._branches:
                assert sources is not None  # the first one is that of the replica
                self._recalled_to(work, stage_id, Replica(sources[0], replica_id), sources, now)
            case e.Recalled(work, stage_id, replica_id):
                self._recalled(work, stage_id, Replica(stage_id - 1, replica_id), now)
            case e.Undelivered(stage_id, request_id, replica_id):
                work = self.works[request_id][stage_id]
                self._dispatched(work, replica_id, now)
                work.reset()
                self.lost[self.entry(stage_id, request_id)] = work
            case e.CannotRunAgain(stage_id, request_id, reason):
                name = self.entry(stage_id, request_id)
                self._tell(r.Aborted(name), now)
                self._fail(name, reason)
            case _:
                self._replica(event, actions, now)

    def _replica(self, event: e.Event, actions: list[e.Action], now: float) -> None:
        match event:
            case e.ReplicaUp(stage_id, replica_id, cause, host):
                self._empty_since.pop(stage_id, None)
                replica = Replica(stage_id, replica_id)
                restarts = self.policy.restarts(replica)
                self._tell(r.Restarted(replica) if restarts else r.Joined(replica, cause, bool(host)), now)
            case e.ReplicaStarting(stage_id, on):
                self._starting[stage_id] += 1 if on else -1
            case e.ReplicaDown(stage_id, _):
                self._note_empty(stage_id, now)
            case e.ReplicaDied(stage_id, replica_id, cause):
                for action in actions:
                    if isinstance(action, e.Lost):
                        self._interrupted(action.work, action.waits, now)
                self._tell(r.Suspected(Replica(stage_id, replica_id), cause), now)
                self._note_empty(stage_id, now)
            case e.DeathExamined(stage_id, replica_id, cause):
                self._tell(r.Died(Replica(stage_id, replica_id), cause), now)
                self._fail_unserved(now)
            case e.RestartFailed(stage_id, replica_id, cause):
                self._tell(r.RestartFailed(Replica(stage_id, replica_id), cause), now)
                self._fail_unserved(now)
            case e.ReplicaGone(stage_id, replica_id, cause):
                self._tell(r.Left(Replica(stage_id, replica_id), cause), now)
                self._note_empty(stage_id, now)
            case e.ReplicaDraining(stage_id, replica_id, on, cause):
                replica = Replica(stage_id, replica_id)
                if self._is_up(replica):  # a dead one stays no longer
                    self._tell(r.Draining(replica) if on else r.Stays(replica, cause), now)
            case e.ReplicaSuspected(stage_id, replica_id, on, cause):
                replica = Replica(stage_id, replica_id)
                if self._is_up(replica):  # a dead one is suspected until its death is examined
                    self._tell(r.Suspected(replica, cause) if on else r.Cleared(replica), now)
            case _:
                pass

    def _is_up(self, replica: Replica) -> bool:
        known = self._stages[replica.stage].replicas.get(replica.index)
        return known is not None and known.up

    # ---- requests

    def track(self, work: StageWork) -> None:
        """Remember work that may have to run again."""
        self.works.setdefault(work.request_id, {})[work.stage_id] = work

    def _dispatched(self, work: StageWork, replica_id: int, now: float) -> None:
        self.track(work)
        replica = self._replica_of(work.stage_id, replica_id)
        self._tell(r.Dispatched(self.entry(work.stage_id, work.request_id), replica, work.request_id), now)

    def _replica_of(self, stage_id: int, replica_id: int) -> Replica:
        """Return the name of a replica; there is one for each, since they are made at every start."""
        key = stage_id, replica_id
        found = self._names.get(key)
        if found is None:
            found = self._names[key] = Replica(stage_id, replica_id)
        return found

    def _ended(self, work: StageWork, receivers: tuple[str, ...], now: float) -> None:
        self._answered(work.stage_id, work.request_id, now)
        if self._together:
            return  # the output of no stage is held
        replica = Replica(work.stage_id, work.replica_id)
        for name in receivers:
            if name != work.request_id and name in self.works:
                self._tell(r.Dispatched(self.entry(work.stage_id, name), replica, name), now)
                self._answered(work.stage_id, name, now)

    def _answered(self, stage_id: int, request_id: str, now: float) -> None:
        name = self.entry(stage_id, request_id)
        self._tell(r.Finished(name, self.policy.attempt(name)), now)

    def _interrupted(self, work: StageWork, waits: bool, now: float) -> None:
        name = self.entry(work.stage_id, work.request_id)
        if waits:
            self._tell(r.Unsent(name), now)
        else:
            self.lost[name] = work

    def _recalled(self, work: StageWork, stage_id: int, sender: Replica, now: float) -> None:
        name = work.request_id
        for receiver in dict.fromkeys((name, *self._stages[stage_id].receivers(name))):
            self._waive(receiver, now)
        if not self.policy.attempt(name) and self.policy.watches(sender):
            self._dispatched(self.works[name][sender.stage], sender.index, now)
        for earlier in range(stage_id):
            self._tell(r.OutputLost(name, earlier), now)
        work.reset()
        self.lost[name] = work
        self._tell(r.Recalled(name), now)

    # ---- stages that branch

    def _lack(self, entry: str, stage_id: int, sources: tuple[int, ...]) -> None:
        """Record that a stage lacks the outputs of these sources, to be made again when the entry is to run again."""
        stages = self._lacking.setdefault(entry, {})
        stages[stage_id] = tuple(dict.fromkeys((*stages.get(stage_id, ()), *sources)))

    def _recalled_to(
        self, work: StageWork, stage_id: int, sender: Replica, sources: tuple[int, ...], now: float
    ) -> None:
        """Let a stage wait for its inputs again; whether the dead sender's output is made again, the policy decides."""
        owner, receivers = work.request_id, self._stages[stage_id].receivers(work.request_id)
        name = receivers[0]
        if name != owner:  # its request has left, and the present leader runs under its own name
            self._stages[stage_id].renamed(owner)
            self.works[owner].pop(stage_id, None)
            self._tell(r.Aborted(self.entry(stage_id, owner)), now)
            work = self.works[name][stage_id]
        for receiver in receivers:
            self._waive(receiver, now)
        flow = _flow(work)
        self._tell(r.Unsent(self.entry(stage_id, name)), now)
        work.reset()
        flow.lose(stage_id, sources)
        if flow.phase(sender.stage) is not StagePhase.DONE:  # it is being made again for another stage
            self._again(work, self.works[name], stage_id, (), None, now)
            return
        entry, known = self.entry(sender.stage, name), self.lost
        self._lack(entry, stage_id, ())
        if entry in known:
            return  # for another stage, too
        known[entry] = self.works[name][sender.stage]
        if not self.policy.attempt(entry):
            self._dispatched(known[entry], sender.index, now)
        if entry in known:  # else the policy knew that the sender is dead, and has moved the work already
            self._tell(r.Recalled(entry), now)

    def run_once_more(self, request_id: str, stage_id: int, now: float) -> list[e.Action]:
        """Run a stage once more for successors that lost its output after it had been sent for others."""
        self._found = []
        works = self.works[request_id]
        flow = _flow(works[stage_id])
        for after in flow.lacks(stage_id):
            if flow.phase(stage_id) is StagePhase.DONE:
                self._again(works[stage_id], works, after, (), None, now)
        return self._found

    def _resume(self, name: str, work: StageWork, replica: Replica, now: float) -> None:
        """Run interrupted work again, if it has its inputs, or else the stages that make them."""
        stage, owner = self._stages[work.stage_id], work.request_id
        receivers = stage.receivers(owner)
        lacking = self._lacking.pop(name, None)
        if lacking is None:
            self._found.append(e.RunsAgain(work, owner, receivers, (work.stage_id,), (work,)))
            self._found += stage.placed(work, replica.index, now)
            return
        for receiver in receivers:
            self._waive(receiver, now)
        stage.renamed(owner)
        for stage_id, sources in lacking.items():
            self._again(work, self.works[receivers[0]], stage_id, sources, replica, now)
        if receivers[0] != owner:  # its request has left, and the present leader runs under its own name
            self.works[owner].pop(work.stage_id, None)
            self._tell(r.Aborted(name), now)
        elif owner not in stage.running:
            self._tell(r.Unsent(name), now)  # it waits for its inputs

    def _again(
        self,
        work: StageWork,
        works: Mapping[int, StageWork],
        stage_id: int,
        lost: tuple[int, ...],
        place: Replica | None,
        now: float,
    ) -> None:
        """Run stages of a request again as its flow says: one on the replica ``place``, the others as they have room.

        Args:
            work: what was interrupted.
            works: of the request in whose name they run.
            stage_id: the stage that is to run, without the outputs of the sources ``lost``.
        """
        known = next(iter(works.values())).known
        leader, flow = known.request_id, known.flow
        assert flow is not None
        stages, starts = flow.again(stage_id, lost)
        if not stages:  # nobody needs the stage any more
            return
        runs = tuple(works[one] for one in starts)
        receivers = self._stages[work.stage_id].receivers(leader)
        self._found.append(e.RunsAgain(work, leader, receivers, stages, runs))
        for one in runs:
            self._runs_anyway(self.entry(one.stage_id, one.request_id), now)
            one.reset()
            stage = self._stages[one.stage_id]
            if place is not None and place.stage == one.stage_id:
                actions = stage.placed(one, place.index, now)
            else:
                stage.waits(one, now)
                actions = stage.release(now)
            self._found += actions
            for action in actions:
                if isinstance(action, e.Start):
                    self._dispatched_now(action.work, now)

    def _runs_anyway(self, entry: str, now: float) -> None:
        """Forget that a stage was to run again for one successor: another one makes it run now, for both."""
        if self.lost.pop(entry, None) is not None:
            self._lacking.pop(entry, None)
            self._tell(r.Aborted(entry), now)

    def _dispatched_now(self, work: StageWork, now: float) -> None:
        """Report a start to the policy, unless the policy itself has placed the work there."""
        replica = self._replica_of(work.stage_id, work.replica_id)
        if self.entry(work.stage_id, work.request_id) not in self.policy.in_flight(replica):
            self._dispatched(work, work.replica_id, now)

    # ---- stages without a replica

    def expects_replica(self, stage_id: int) -> bool:
        """Return whether a replica of the stage serves, is being started, or may serve again soon."""
        return self._starting[stage_id] > 0 or self.policy.coming(stage_id)

    def _note_empty(self, stage_id: int, now: float) -> None:
        if not self._stages[stage_id].num_up:
            self._empty_since.setdefault(stage_id, now)
            self._replicas_changed = True

    def _came_to_empty_stage(self, work: StageWork, now: float) -> None:
        if not self.expects_replica(work.stage_id):
            self._give_up(work, FailReason.NO_REPLICA)
        else:
            self._plan_wake(now, min(self._due, self._until(work)))

    def _until(self, work: StageWork) -> float:
        """Return how long queued work of a stage without a replica may wait for one."""
        return max(work.arrived, self._empty_since[work.stage_id]) + self.policy.options.max_wait_seconds

    def _next_unserved(self) -> float:
        """Return when the next request in the queue of a stage without a replica fails."""
        waiting = (work for stage_id in self._empty_since for work in self._stages[stage_id].waiting.values())
        return min((self._until(work) for work in waiting if work.request_id not in self._given_up), default=math.inf)

    def _fail_unserved(self, now: float) -> None:
        for stage_id, since in self._empty_since.items():
            reason = self.policy.unserved(self.expects_replica(stage_id), since, now)
            if reason is None:
                continue
            none_comes = reason is FailReason.NO_REPLICA
            for work in list(self._stages[stage_id].waiting.values()):
                if none_comes or now >= self._until(work):
                    self._give_up(work, reason)
            until = now if none_comes else now - self.policy.options.max_wait_seconds
            self._found.append(e.Unserved(stage_id, until, reason))

    # ---- time

    def _plan_wake(self, now: float, due: float) -> None:
        self._due = due
        if due < self._wake_at:
            self._wake_at = max(due, now)
            self._found.append(e.Wake(None, self._wake_at))

    # ---- decisions of the policy

    def _tell(self, event: r.Event, now: float) -> None:
        if isinstance(event, _OF_REPLICAS):
            self._replicas_changed = True
        for action in self.policy.on_event(event, now):
            match action:
                case r.Redispatch(name, replica, _, stages):
                    self._move(name, replica, stages, now)
                case r.Fail(name, reason):
                    self._fail(name, reason)
                case r.Wait(name, until) if name in self.lost:
                    self._replicas_changed = True
                    self._found.append(e.Postponed(self.lost[name], until))
                case r.Restart(replica):
                    self._found.append(e.Restart(replica.stage, replica.index))
                case r.Record(incident):
                    self._found.append(e.Report(incident))
                case _:
                    pass  # an answer: it is delivered by the stage

    def _move(self, name: str, replica: Replica, stages: tuple[int, ...], now: float) -> None:
        work = self.lost.pop(name, None)
        if work is None:
            return
        if name not in self._lacking and self.restarts_together(work):
            self._run_together(work, replica, now)
            return
        if self._branches:
            self._resume(name, work, replica, now)
            return
        stage, present = self._stages[work.stage_id], work.request_id
        receivers = stage.receivers(present)
        runs = work
        if stages[0] != work.stage_id:
            for receiver in receivers:
                self._waive(receiver, now)
            stage.renamed(present)
            present = receivers[0]
            runs = self.works[present][stages[0]]
            runs.reset()
        self._found.append(e.RunsAgain(work, present, receivers, stages, (runs,)))
        self._found += self._stages[runs.stage_id].placed(runs, replica.index, now)
        if present != name:  # its request has left, and the present leader runs under its own name
            del self.works[name]
            self._tell(r.Aborted(name), now)
            self._dispatched(runs, replica.index, now)

    def _run_together(self, work: StageWork, replica: Replica, now: float) -> None:
        name, works = work.request_id, self.works[work.request_id]
        flow = work.known.flow if self._branches else None
        order = tuple(sorted(works if flow is None else works.keys() & set(flow.restart(work.stage_id))))
        receivers = self._stages[work.stage_id].receivers(name)
        self._found.append(
            e.RunsAgain(work, receivers[0], receivers, order, tuple(works[stage_id] for stage_id in order))
        )
        for stage_id in order:
            stage = self._stages[stage_id]
            if works[stage_id] is work:
                self._found += stage.placed(work, replica.index, now)
            elif not (name in stage.running or name in stage.waiting or self.entry(stage_id, name) in self.lost):
                stage.waits(works[stage_id], now)
                started = stage.release(now)
                self._found += started
                for action in started:
                    if isinstance(action, e.Start):
                        self._dispatched(action.work, action.work.replica_id, now)

    def _fail(self, name: str, reason: FailReason) -> None:
        work = self.lost.pop(name, None)
        if work is not None:
            self._give_up(work, reason)

    def _give_up(self, work: StageWork, reason: FailReason) -> None:
        everybody = self._stages[work.stage_id].receivers(work.request_id)
        receivers = tuple(name for name in everybody if name not in self._given_up)
        if receivers:
            self._given_up.update(receivers)
            self._found.append(e.GivenUp(work, receivers, reason))

    # ---- conservation

    def validate(self) -> None:
        """Check the laws of conservation; O(n), for tests.

        Raises:
            AssertionError: one is broken.
        """
        self.policy.validate()
        for stage_id, stage in self._stages.items():
            for name, work in stage.running.items():
                replica, entry = Replica(stage_id, work.replica_id), self.entry(stage_id, name)
                assert entry in self.policy.in_flight(replica), f"{name} is not in flight on {replica}"
                assert entry not in self.lost, f"{name} runs in stage {stage_id} and is interrupted there"
                assert self.works[name][stage_id] is work, f"{name} runs in stage {stage_id} as other work"
        for entry, work in self.lost.items():
            assert self.policy.attempt(entry), f"{entry} is interrupted, and recovery does not know it"
            assert entry == self.entry(work.stage_id, work.request_id), f"{entry} is {work.request_id}"
            assert work.request_id not in self._stages[work.stage_id].waiting, f"{entry} is interrupted and waits"


def _flow(work: StageWork) -> RequestFlow:
    assert work.known.flow is not None, f"{work.request_id} has no flow, and stages branch"
    return work.known.flow


_OF_REPLICAS = (r.ReplicaEvent, r.Tick)
_OFTEN = (e.Submitted, e.FirstOutput, e.Finished, e.Arrived, e.Left, e.Detached, e.Dropped)
"""Events from which nothing follows but from their actions."""

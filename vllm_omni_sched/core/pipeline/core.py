"""Decide what happens to requests in a pipeline: events in, actions out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from vllm_omni_sched.config.stage_options import BranchErrors
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.context import PipelineContext
from vllm_omni_sched.core.pipeline.recovery import PipelineRecovery
from vllm_omni_sched.core.pipeline.requests import PipelineRequest
from vllm_omni_sched.core.pipeline.stage import StageScheduler
from vllm_omni_sched.core.pipeline.watch import PipelineWatch
from vllm_omni_sched.graph.flow import RequestFlow, StagePhase
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.monitor.recovery.options import recovery_options
from vllm_omni_sched.monitor.recovery.policy import Recovery
from vllm_omni_sched.monitor.recovery.remedies import Remedies, RemedyAction, RemedyOptions, Trigger
from vllm_omni_sched.resource.pipeline.links import HERE

KEPT_TRANSITIONS = 10_000


class Transition(NamedTuple):
    """What happened to a request in a stage, and when. ``replica_id``: -1 if none is concerned."""

    at: float
    request_id: str
    stage_id: int
    what: str
    replica_id: int = -1

    def __str__(self) -> str:
        where = "pipeline" if self.stage_id < 0 else f"stage {self.stage_id}"
        on = "" if self.replica_id < 0 else f" on replica {self.replica_id}"
        return f"{self.at:.6f} {where}: {self.request_id} {self.what}{on}"


class PipelineCore:
    """The state machine of a pipeline: it owns what waits, runs and follows in each stage, and decides.

    1. `handle` is the only way in. It takes an event and the time, and returns the actions to carry out, in order. It
       has no clock, does no I/O, and knows no engine; the random source is that of the context.
    2. The same events give the same actions.
    3. `Waits`, `Tick` and `Woken` answer with what can start; after other events, what has got room starts with the
       next `Tick`.
    4. What follows the death of a replica is decided by `Recovery`, unless that is off, and done by `PipelineRecovery`.
    5. `Check` answers with anomalies that begin (`PipelineWatch`).
    6. What follows from an anomaly of a replica that serves is decided by `Remedies`, if options ask for it. A request
       that is in a stage for too long concerns its replica; a queue that stands still, the replica of the stage that
       has had a request for longest.
    7. Where stages branch, `RequestFlow` decides which stages of a request start next (`Proceeds`), and what ends with
       the error of one (`Fails`); the option `branch_errors` says whether outputs that do not depend on it still come.
       They do not if the stages that make them were stopped to run again together with the one that is given up.
    8. Drivers read `stages`, `context` and `recovery`, and never change them.

    Args:
        context: what the stages share.
        keeps_outputs: whether the output of each stage is held until its request leaves, so that none runs again.
        checked: whether `Check` comes now and then; otherwise no anomalies are detected.
    """

    def __init__(self, context: PipelineContext, keeps_outputs: bool = False, checked: bool = True) -> None:
        self.context = context
        self.stages: dict[int, StageScheduler] = {}
        self.recovery = self._recovery(keeps_outputs)
        monitoring = context.config.monitoring
        watched = checked and monitoring.enabled and monitoring.anomaly.enabled
        self._remedies = self._remedies_of(monitoring.anomaly.enabled and monitoring.enabled)
        self._watch = PipelineWatch(monitoring.anomaly, context.graph) if watched else None
        self._departed: dict[str, None] = {}  # requests that have left while work begun for them goes on
        self.log: deque[Transition] = deque(maxlen=KEPT_TRANSITIONS)

    def add_stage(
        self,
        stage_id: int,
        max_num_seqs: int,
        replicas: Iterable[int],
        together: bool = False,
        hosts: Mapping[int, str] | None = None,
    ) -> StageScheduler:
        """Add a stage of the graph; ``max_num_seqs``, ``together`` and ``hosts`` as for `StageScheduler`."""
        stage = StageScheduler(self.context, stage_id, max_num_seqs, replicas, together, hosts)
        self.stages[stage_id] = stage
        if self.recovery is not None:
            for replica_id in stage.replicas:
                away = self.context.links.host(stage_id, replica_id) != HERE
                self.recovery.policy.watch(Replica(stage_id, replica_id), away)
        return stage

    def _recovery(self, keeps_outputs: bool) -> PipelineRecovery | None:
        context = self.context
        options = context.config.runtime.recovery
        if not options.enabled:
            return None
        # if all stages run at once, none waits for the output of another
        alone = context.together or keeps_outputs
        alone = alone or context.branches  # there the flows of the requests know what runs again
        sources = {} if alone else {stage.stage_id: stage.sources for stage in context.graph.stages}
        policy = Recovery({}, sources, recovery_options(options), context.rng)
        return PipelineRecovery(policy, self.stages, context.together, self._waive, context.branches)

    def _remedies_of(self, watched: bool) -> Remedies | None:
        options = self.context.config.runtime.recovery
        if not (watched and options.enabled and options.act_on):
            return None
        chosen = RemedyOptions(
            act_on=frozenset(map(Trigger, options.act_on)),
            dry_run=options.dry_run,
            cooldown_seconds=options.cooldown_seconds,
            max_restarts=options.max_restarts,
            window_seconds=options.window_seconds,
        )
        return Remedies(chosen, self._serves)

    def _serves(self, replica: Replica) -> bool:
        known = self.stages[replica.stage].replicas.get(replica.index) if replica.stage in self.stages else None
        return known is not None and known.serves

    def handle(self, event: e.Event, now: float) -> list[e.Action]:
        """Record an event, and return what to do.

        Raises:
            TypeError: it is not an event.
        """
        actions = self._handle(event, now)
        if self.recovery is not None:
            actions += self.recovery.after(event, actions, now)
        if isinstance(event, e.Finished):
            actions += self._proceeding(actions, now)
        if isinstance(event, e.Left):
            self._departed[event.request_id] = None
        if self._departed:
            actions += self._forgotten(now)
        if self._watch is not None:
            self._watch.after(actions, now)
        if self._remedies is not None:
            actions += self._remedied(self._remedies, event, actions, now)
        for action in actions:
            self._log(action, now)
        return actions

    def _remedied(self, remedies: Remedies, event: e.Event, actions: list[e.Action], now: float) -> list[e.Remedy]:
        """Return what follows from anomalies that begin, and from the ends of replacements."""
        found: list[RemedyAction] = []
        for action in actions:
            match action:
                case e.AnomalyBegins(stage_id, anomaly):
                    replica_id = self._concerned(stage_id, anomaly.request_id)
                    if replica_id is not None:
                        found += remedies.found(anomaly.kind, Replica(stage_id, replica_id), now)
                case e.Ended(work, _, True) if remedies.replacing is not None:
                    remedies.finished(Replica(work.stage_id, work.replica_id))
                case _:
                    pass
        match event:
            case e.AnomalyFound(stage_id, replica_id, kind):
                found += remedies.found(kind, Replica(stage_id, replica_id), now)
            case e.ReplaceEnded(stage_id, replica_id, outcome):
                found += remedies.ended(Replica(stage_id, replica_id), outcome, now)
            case e.Check():
                found += remedies.tick(now)
            case _:
                pass
        return [e.Remedy(one) for one in found]

    def _concerned(self, stage_id: int, request_id: str) -> int | None:
        """Return the replica that runs a request, or without one what has run for longest in a stage."""
        running = self.stages[stage_id].running
        if request_id:
            work = running.get(request_id)
        else:
            works = (one for one in running.values() if one.started is not None)
            work = min(works, key=lambda one: one.started or 0.0, default=None)
        return None if work is None or work.replica_id < 0 else work.replica_id

    def _proceeding(self, ended: list[e.Action], now: float) -> list[e.Action]:
        """Return where requests go on whose work has ended, for those whose flow the core follows."""
        found: list[e.Action] = []
        for action in ended:
            if not (isinstance(action, e.Ended) and action.ok):
                continue
            stage_id = action.work.stage_id
            for name in action.receivers:
                known = self.context.known.get(name)
                if known is None or known.flow is None:
                    continue
                found.append(e.Proceeds(name, stage_id, known.flow.finished(stage_id)))
                if self.recovery is not None and known.flow.lacks(stage_id):
                    found += self.recovery.run_once_more(name, stage_id, now)
        return found

    def _stage_failed(self, stage_id: int, request_id: str, now: float) -> list[e.Action]:
        known, context = self.context.known.get(request_id), self.context
        if known is None or known.flow is None:
            return [e.Fails(request_id, stage_id, (), (), whole=True, over=True)]
        flow = known.flow
        only_output = context.config.runtime.branch_errors is BranchErrors.OUTPUT and not self._stopped(
            flow, known, stage_id
        )
        dropped = flow.failed(stage_id)
        whole = not only_output or len(flow.dropped) == len(flow.plan.outputs)
        if context.credits is not None:
            for one in dropped.stages:
                context.credits.give_back(request_id, str(one))
            self._credits_changed(request_id, now)
        return [e.Fails(request_id, stage_id, *dropped, whole=whole, over=whole or flow.is_over)]

    def _stopped(self, flow: RequestFlow, request: PipelineRequest, stage_id: int) -> bool:
        """Return whether stages that exchange chunks with this one were stopped, to run again together with it."""
        others = [self.stages[one] for one in flow.plan.chunk_groups.get(stage_id, ()) if one != stage_id]
        started = [one for one in others if flow.phase(one.stage_id) is StagePhase.STARTED]
        names = [(one, one.leader_of(request.request_id)) for one in started]
        return any(name not in one.waiting and name not in one.running for one, name in names)

    def _check(self, now: float) -> list[e.Action]:
        return [] if self._watch is None else self._watch.check(self.stages, now)

    def _forgotten(self, now: float) -> list[e.Action]:
        """Forget requests that have left, as soon as no work that was begun for them goes on."""
        found: list[e.Action] = []
        for name in [one for one in self._departed if not self._goes_on(one)]:
            del self._departed[name]
            found += [e.Forgotten(name)] if self.recovery is None else self.recovery.forget(name, now)
        return found

    def _goes_on(self, request_id: str) -> bool:
        """Return whether work that was begun for a request runs, or is needed by others."""
        stages = self.stages.values()
        return any(stage.works_for_others(request_id) or request_id in stage.running for stage in stages)

    def story(self, request_id: str) -> list[str]:
        """Return what has happened to a request, oldest first, as far as it is remembered."""
        return [str(one) for one in self.log if one.request_id == request_id]

    def _handle(self, event: e.Event, now: float) -> list[e.Action]:
        context, stages = self.context, self.stages
        match event:
            case e.Submitted(work, features):
                actions = stages[work.stage_id].submitted(work, features, now)
                if context.credits is not None:
                    self._credits_changed(work.request_id, now)
                return actions
            case e.Waits(work):
                stage = stages[work.stage_id]
                stage.waits(work, now)
                self.log.append(Transition(now, work.request_id, work.stage_id, "waits"))
                return self._release(stage, now)
            case e.Finished(stage_id, request_id, ok):
                return self._ended(stages[stage_id].finished(request_id, ok, now), now)
            case e.FirstOutput(stage_id, request_id, seconds):
                if stages[stage_id].first_output(request_id, seconds, now):
                    self.log.append(Transition(now, request_id, stage_id, "has its first output"))
            case e.Tick(which):
                each = sorted(stages, reverse=True) if which is None else [which]
                return [action for one in each for action in self._release(stages[one], now)]
            case e.Woken(stage_id, at):
                if stage_id is not None and stages[stage_id].woken(at):
                    return self._release(stages[stage_id], now)
            case e.Arrived(request):
                context.arrived(request)
                self.log.append(Transition(now, request.request_id, -1, "arrives"))
                if request.flow is not None:
                    return [e.Proceeds(request.request_id, None, request.flow.begin())]
            case e.Left(request_id):
                context.left(request_id)
                self.log.append(Transition(now, request_id, -1, "leaves"))
            case e.Placed(work, replica_id):
                return self._started(stages[work.stage_id].placed(work, replica_id, now), now)
            case e.StageFailed(stage_id, request_id):
                return self._stage_failed(stage_id, request_id, now)
            case e.Detached(stage_id, request_id):
                return stages[stage_id].detached(request_id, now)
            case e.Dropped(stage_id, request_id):
                return self._ended(stages[stage_id].dropped(request_id, now), now)
            case e.Held(stage_id, request_id):
                stages[stage_id].hold(request_id)
            case e.Resumed(stage_id, request_id):
                stages[stage_id].resume(request_id, now)
            case e.TakenOut(stage_id, request_id):
                taken = stages[stage_id].take_out(request_id)
                if taken is not None and self.recovery is not None and self.recovery.restarts_together(taken):
                    self.recovery.track(taken)  # other work of its request was interrupted: it runs again with that
            case e.Withdrawn(stage_id, request_id):
                return stages[stage_id].withdrawn(request_id, now)
            case e.Regrouped(stage_id, request_id, receivers):
                stages[stage_id].regrouped(request_id, receivers)
            case e.Renamed(stage_id, request_id):
                stages[stage_id].renamed(request_id)
            case e.Asked(stage_id, request_id):
                return [e.Chosen(request_id, stages[stage_id].choose(now))]
            case e.InputsLost() | e.Undelivered() | e.CannotRunAgain():
                pass  # of interest to recovery alone
            case e.Recalled(work, stage_id):
                self.log.append(Transition(now, work.request_id, stage_id, "loses its input"))
            case e.Check():
                return self._check(now)
            case e.MemoryMeasured(used):
                context.memory_used = used
            case _:
                return self._replica(event, now)
        return []

    def _replica(self, event: e.Event, now: float) -> list[e.Action]:
        stages = self.stages
        match event:
            case e.ReplicaUp(stage_id, replica_id, _, host):
                stages[stage_id].replica_up(replica_id, host)
            case e.PayloadsMeasured(from_stage, to_stage, messages, nbytes):
                self.context.links.measured(from_stage, to_stage, messages, nbytes)
            case e.ReplicaDown(stage_id, replica_id):
                stages[stage_id].replica_down(replica_id)
            case e.ReplicaDied(stage_id, replica_id):
                return stages[stage_id].replica_died(replica_id, now)
            case e.ReplicaGone(stage_id, replica_id):
                stages[stage_id].replica_gone(replica_id)
            case e.ReplicaDraining(stage_id, replica_id, on):
                stages[stage_id].mark(replica_id, draining=on)
            case e.ReplicaSuspected(stage_id, replica_id, on):
                stages[stage_id].mark(replica_id, suspected=on)
            case e.DeathExamined() | e.RestartFailed() | e.ReplicaStarting():
                pass  # of interest to recovery alone
            case e.AnomalyFound() | e.ReplaceEnded():
                pass  # of interest to remedies alone
            case _:
                raise TypeError(f"not an event of a pipeline: {event!r}")
        return []

    def _release(self, stage: StageScheduler, now: float) -> list[e.Action]:
        return self._started(stage.release(now), now)

    def _started(self, actions: list[e.Action], now: float) -> list[e.Action]:
        if self.context.credits is not None:
            for action in actions:
                if isinstance(action, e.Start):
                    self._credits_changed(action.work.request_id, now)
        return actions

    def _ended(self, actions: list[e.Action], now: float) -> list[e.Action]:
        """Give back the credits of work that is over."""
        credits = self.context.credits
        if credits is not None:
            for action in actions:
                if isinstance(action, e.Ended | e.Gone):
                    credits.give_back(action.work.request_id, str(action.work.stage_id))
                    self._credits_changed(action.work.request_id, now)
        return actions

    def _waive(self, request_id: str, now: float) -> None:
        context = self.context
        if context.credits is not None and request_id in context.known:
            context.waived.add(request_id)
            context.credits.give_back(request_id)
            self._credits_changed(request_id, now)

    def _credits_changed(self, request_id: str, now: float) -> None:
        for stage in self.stages.values():
            stage.credits_changed(request_id, now)

    def _log(self, action: e.Action, now: float) -> None:
        match action:
            case e.Start(work, reason):
                what = "starts" if reason is None else f"starts ({reason.value})"
                self.log.append(Transition(now, work.request_id, work.stage_id, what, work.replica_id))
            case e.Follow(work, leader):
                self.log.append(Transition(now, work.request_id, work.stage_id, f"follows {leader}"))
            case e.Ended(work, _, ok):
                what = "is done" if ok else "fails"
                self.log.append(Transition(now, work.request_id, work.stage_id, what, work.replica_id))
            case e.Fails(request_id, stage_id, _, _, whole):
                what = "fails as a whole" if whole else "fails with the outputs that need it"
                self.log.append(Transition(now, request_id, stage_id, what))
            case e.Gone(work):
                self.log.append(Transition(now, work.request_id, work.stage_id, "is stopped", work.replica_id))
            case e.Lost(work, replica_id, waits):
                what = "is lost before it was sent, and waits" if waits else "is lost"
                self.log.append(Transition(now, work.request_id, work.stage_id, what, replica_id))
            case e.Inherited(owner, heir):
                self.log.append(Transition(now, heir.request_id, heir.stage_id, f"waits in the place of {owner}"))
            case e.Continued(stage_id, request_id, heir):
                name = request_id if heir is None else heir.request_id
                self.log.append(Transition(now, name, stage_id, f"takes over the work of {request_id}"))
            case e.RunsAgain(work, leader, _, which):
                what = f"runs again from stage {which[0]}"
                self.log.append(Transition(now, leader, work.stage_id, what))
            case e.Postponed(work, until):
                self.log.append(
                    Transition(now, work.request_id, work.stage_id, f"waits for a replica until {until:.6f}")
                )
            case e.GivenUp(work, receivers, why):
                for name in receivers:
                    self.log.append(Transition(now, name, work.stage_id, f"is given up ({why.value})"))
            case _:
                pass

    def validate(self) -> None:
        """Check the laws of conservation; O(n), for tests.

        Raises:
            AssertionError: one is broken.
        """
        for stage in self.stages.values():
            stage.validate()
        context = self.context
        if self._remedies is not None:
            self._remedies.validate()
        assert context.waived <= context.known.keys(), "waived credits of requests that have left"
        self._validate_flows()
        if self.recovery is not None:
            self.recovery.validate()
            gone = self.recovery.works.keys() - context.known.keys() - self._departed.keys()
            assert not gone, f"recovery keeps work of requests that have left: {gone}"
        if context.credits is not None:
            context.credits.validate()

    def _validate_flows(self) -> None:
        for known in self.context.known.values():
            if known.flow is not None:
                known.flow.validate()
        for stage_id, stage in self.stages.items():
            for name in (*stage.waiting, *stage.running):
                one = self.context.known.get(name)
                if one is not None and one.flow is not None and not stage.works_for_others(name):
                    phase = one.flow.phase(stage_id)  # what was dropped is still to be stopped by the driver
                    may = phase in (StagePhase.STARTED, StagePhase.DROPPED)
                    assert may, f"{name} is in stage {stage_id}, where it is {phase}"

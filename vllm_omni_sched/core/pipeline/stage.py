"""Schedule the requests of one stage: which starts next, on which replica, and which share work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vllm_omni_sched.core.pipeline.context import PipelineContext
from vllm_omni_sched.core.pipeline.events import (
    Action,
    Continued,
    Ended,
    Follow,
    Gone,
    Inherited,
    Lead,
    Lost,
    Start,
    Stop,
    Wake,
)
from vllm_omni_sched.core.pipeline.load import ReplicaLoad
from vllm_omni_sched.core.pipeline.requests import UNPLACED, StageWork
from vllm_omni_sched.core.pipeline.waiting import StageView, WaitingRequests
from vllm_omni_sched.graph.merging import Merger, Role
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.resource.pipeline.balance import CHOICES, ReplicaIndex, drawn, draws
from vllm_omni_sched.resource.pipeline.links import HERE
from vllm_omni_sched.resource.pipeline.replica_speeds import ReplicaSpeeds
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_cost import Features
from vllm_omni_sched.resource.pipeline.stage_gate import Release, ReleaseReason, StageGate
from vllm_omni_sched.resource.pipeline.stage_limits import control_of, units_of, window_of

LEAD_SECONDS = 0.06  # for a request to get from the scheduler to an engine
AHEAD = 4  # one request waits in an engine for each so many that it runs at once
SMOOTHING = 0.1  # weight of the last request


class StageReplica:
    """A replica of a stage: its load, its running work by request, and whether it may get more."""

    __slots__ = ("draining", "load", "spare", "standby", "suspected", "up", "works")

    def __init__(self, load: ReplicaLoad) -> None:
        self.load = load
        self.works: dict[str, StageWork] = {}
        self.up, self.suspected, self.draining = True, False, False
        self.standby = False  # it is on a standby host
        self.spare = False  # and is not needed now

    @property
    def serves(self) -> bool:
        """Return whether it may get requests that could go elsewhere."""
        return self.up and not self.suspected and not self.draining and not self.spare


class StageScheduler:
    """Requests of one stage: waiting, running, or following one of these.

    1. A request whose work is already in flight follows it, and gets the output together with the leader.
    2. Otherwise it waits until the gate releases it to a replica (`StageGate`, `WaitingRequests`).
    3. Up to `LOOK_AT_ALL` replicas, all are considered for each decision. Of more, `CHOICES` are drawn for each request
       released: idle ones first, then others with room; and as many of the warmest. Only a round-robin balancer
       considers all.
    4. A replica gets as many requests as it runs at once. With a latency target, those that have no first output yet
       are limited in an autoregressive stage, and all of them in others (`ReplicaLoad`). Batches are held only in the
       latter: an autoregressive stage admits requests at each step.
    5. A few more requests than run wait in an engine, as its places would otherwise be empty until the next request is
       there. As many wait as run while there is nothing to choose: the stage has one replica, and all requests that
       have come had one class and priority. If an autoregressive stage runs only a few, one waits while a place is
       about to be free. A stage whose batches are held, or that draws, gets none.
    6. Costs and speeds of replicas are learnt from each result.
    7. A replica that got items of a request before saves their share of the seconds that the stage takes for all of its
       items. While these are not learnt, the balancer assumes a fraction of the whole.
    8. A replica on a standby host gets requests only while no replica on another host serves. Requests that were
       interrupted may go there anyway, as recovery decides.
    9. The input of a request takes as long to a replica as the link to its host takes (`HostLinks`), if its speed is
       known; otherwise all hosts count as equally near.
    10. Work goes on while any request needs it: when the request it was begun for leaves, its followers keep it.

    Every event takes O(log n) in the requests that wait and run.

    Args:
        max_num_seqs: requests that a replica can run at a time.
        together: all stages of a request run under one name (async-chunk mode); no other request can take its place.
            This also holds for stages of the graph that exchange chunks.
        hosts: of replicas, where it is another one than that of the front end.
    """

    def __init__(
        self,
        context: PipelineContext,
        stage_id: int,
        max_num_seqs: int,
        replicas: Iterable[int],
        together: bool = False,
        hosts: Mapping[int, str] | None = None,
    ) -> None:
        self.stage_id, self._name, self._context = stage_id, str(stage_id), context
        self._together = together or context.graph.exchanges_chunks(stage_id)
        config, stage = context.config, context.graph.stage(stage_id)
        self._kind = stage.kind
        self._first_output = stage.kind is StageKind.AR
        self._limits = config.batching.of_stage(stage_id, stage.name)
        self._max_num_seqs = max_num_seqs
        # A stage that reads chunks starts with its sources: its latency is theirs, and no limit here could lower it.
        self._controls = not (stage.sources and (together or stage.reads_chunks))
        self._window = window_of(config.batching, self._limits) if self._controls else None  # only tells what is long
        self._source = max(stage.sources, default=None)
        priority = config.graph.priority
        self.gate = StageGate(
            context.balancer(),
            max_hold_seconds=0.0 if self._first_output else self._limits.hold_ms / 1e3,
            min_share=priority.min_low_share if priority.enabled else 0.0,
            order=context.waiting_order(),
        )
        waits_in_engine = stage.kind is not StageKind.DIFFUSION and not self.gate.max_hold_seconds
        self._few_ahead = max_num_seqs // AHEAD if waits_in_engine else 0
        view = StageView(self._long_units, self._warm, self._saved_seconds, self._distances)
        self._queue = WaitingRequests(context, stage_id, self.gate, view)
        self.merger: Merger = Merger()
        self.replicas: dict[int, StageReplica] = {}
        self.speeds = ReplicaSpeeds()
        self._index = ReplicaIndex()  # of replicas that serve
        self.waiting: dict[str, StageWork] = {}
        self.running: dict[str, StageWork] = {}  # by the request it was begun for
        self.held: set[str] = set()  # requests that wait for an input of their own
        self._following: dict[str, StageWork] = {}
        self._leader: dict[str, str] = {}  # request that work was begun for -> present leader, if another one
        self._begun_for: dict[str, str] = {}  # the reverse
        self._wake_at = float("inf")  # time of the next `Woken`
        self.request_seconds: float | None = None  # replica time of a request
        for replica_id in replicas:
            self.replica_up(replica_id, (hosts or {}).get(replica_id, HERE))

    # ---- what drivers ask

    def receivers(self, request_id: str) -> tuple[str, ...]:
        """Return the requests that get the outputs of the work that was begun for ``request_id``."""
        leader = self._leader.get(request_id, request_id) if self._leader else request_id
        return self.merger.members(leader) or (request_id,)

    def leader_of(self, request_id: str) -> str:
        """Return the request for which the work was begun whose output ``request_id`` gets here."""
        leader = self.merger.leader(request_id)
        return self._begun_for.get(leader, leader)

    def works_for_others(self, request_id: str) -> bool:
        """Return whether the work that was begun for a request is now needed only by others."""
        return request_id in self._leader

    def knows(self, request_id: str) -> bool:
        """Return whether a request waits, runs or follows here, or work goes on that was begun for it."""
        return (
            request_id in self.running
            or request_id in self.waiting
            or request_id in self.held
            or request_id in self._following
            or request_id in self._leader
            or request_id in self._begun_for
            or request_id in self.merger
        )

    @property
    def num_up(self) -> int:
        """Return the number of replicas that are up."""
        return sum(one.up for one in self.replicas.values())

    # ---- requests

    def submitted(self, work: StageWork, features: Features, now: float) -> list[Action]:
        """Record a request that has come to the stage (`Submitted`): it leads, or follows work that is in flight."""
        work.known.features[self.stage_id] = features
        name = work.request_id
        if self.merger.members(name):  # it comes again, after a death, and keeps its followers
            return [Lead(work, again=True)]
        joined = self.merger.join(work.key, name)
        follows = joined.role is Role.FOLLOW
        self._context.hand_over(self.stage_id, work.known, follows)
        if not follows:
            return [Lead(work)]
        self._following[name] = work
        return [Follow(work, joined.leader)]

    def waits(self, work: StageWork, now: float) -> None:
        """Queue work."""
        self._form_group(work)
        self._put(work, now)

    def placed(self, work: StageWork, replica_id: int, now: float) -> list[Action]:
        """Start work on a replica that recovery has chosen."""
        self._form_group(work)
        self.take_out(work.request_id)
        self._estimate(work)
        return [self._begin(work, replica_id, None, now)]

    def _form_group(self, work: StageWork) -> None:
        """Form a group for work that comes again after its group has ended here."""
        if not self.merger.members(work.request_id) and work.request_id not in self._leader:
            self.merger.join(None, work.request_id)

    def _estimate(self, work: StageWork) -> None:
        known, stage_id = work.known, self.stage_id
        work.cost_seconds = known.costs[stage_id] = self._context.costs.estimate(self._name, known.features[stage_id])

    def _put(self, work: StageWork, now: float) -> None:
        self._estimate(work)
        work.reset()
        self.waiting[work.request_id] = work
        if work.request_id not in self.held:
            self._queue.put(work, now)

    def take_out(self, request_id: str) -> StageWork | None:
        """Remove the waiting work of a request and return it; None if there is none."""
        self._queue.remove(request_id)
        return self.waiting.pop(request_id, None)

    def hold(self, request_id: str) -> None:
        """Keep a request in the queue until `resume`."""
        self.held.add(request_id)
        self._queue.remove(request_id)

    def resume(self, request_id: str, now: float) -> None:
        """Allow a held request to be released; others are ignored."""
        if request_id in self.held:
            self.held.remove(request_id)
            if request_id in self.waiting:
                self._queue.put(self.waiting[request_id], now)

    def credits_changed(self, request_id: str, now: float) -> None:
        """Describe a waiting request again after credits were taken or given back for it, here or elsewhere."""
        self._queue.credits_changed(request_id, now)

    def first_output(self, request_id: str, seconds: float | None, now: float) -> bool:
        """Record an output of running work; return whether it was the first."""
        work = self.running.get(request_id)
        if work is None or work.has_output:
            return False
        work.has_output = True
        if self._first_output:
            self._through(work, seconds, now)
        return True

    def _through(self, work: StageWork, seconds: float | None, now: float) -> None:
        replica = self.replicas.get(work.replica_id)
        if replica is not None and work.started is not None:
            seconds = max(now - work.started, 0.0) if seconds is None else seconds
            replica.load.through(work.request_id, now, seconds, self._context.memory_used)
            self._changed(work.replica_id, replica)

    def finished(self, request_id: str, ok: bool, now: float) -> list[Action]:
        """Record the end of work; costs and speeds are learnt if it has a result."""
        leader = self._leader.pop(request_id, request_id)
        self._begun_for.pop(leader, None)
        receivers = self.merger.members(leader) or (leader,)
        followers = [self._following.pop(name, None) for name in self.merger.finish(leader)]
        work = self.running.pop(request_id, None)
        if work is None:
            return []
        if ok and not self._first_output:
            self._through(work, None, now)
        share = self._end(work, now)
        if ok:
            if share is not None:
                self._learn(work, share)
            for one in (work, *followers):
                if one is not None:
                    one.known.replicas[self.stage_id] = work.replica_id
        return [Ended(work, receivers, ok)]

    def _end(self, work: StageWork, now: float) -> float | None:
        """Take work off its replica, and return the seconds that it had."""
        replica = self.replicas.get(work.replica_id)
        if replica is None or replica.works.pop(work.request_id, None) is None:
            return None
        share = replica.load.end(work.request_id, now)
        self._changed(work.replica_id, replica)
        return share

    def _learn(self, work: StageWork, share: float) -> None:
        stage_id, replica_id = self.stage_id, work.replica_id
        self._context.costs.observe(self._name, work.known.features[stage_id], share)
        self.speeds.observe(replica_id, work.cost_seconds, share)
        self.replicas[replica_id].load.speed = self.speeds.speed(replica_id)
        before = share if self.request_seconds is None else self.request_seconds
        self.request_seconds = before + SMOOTHING * (share - before)

    def withdrawn(self, request_id: str, now: float) -> list[Action]:
        """Take back running work that was stopped to run again with its followers; its request keeps its credits."""
        work = self.running.pop(request_id, None)
        if work is None:
            return []
        self._end(work, now)
        replica_id = work.replica_id
        work.reset()
        return [Lost(work, replica_id)]

    # ---- requests that leave

    def detached(self, request_id: str, now: float) -> list[Action]:
        """Take out a request that needs the work of this stage no longer (`Detached`), before the work is stopped."""
        left = self.merger.leave(request_id)
        if left.promoted is not None:
            begun_for = self._begun_for.pop(request_id, request_id)
            heir = self._following.pop(left.promoted, None)
            if heir is None or begun_for in self.running or self._together:
                self._leader[begun_for] = left.promoted
                self._begun_for[left.promoted] = begun_for
                return [Continued(self.stage_id, begun_for, heir)]
            self._leader.pop(begun_for, None)
            self.take_out(begun_for)
            self._put(heir, now)
            return [Inherited(begun_for, heir)]
        orphan = self._begun_for.pop(request_id, None)  # work of a request that left before, of which this was the last
        self._following.pop(request_id, None)
        if orphan is None:
            return []
        del self._leader[orphan]
        self.take_out(orphan)
        work = self.running.get(orphan)
        return [] if work is None else [Stop(work)]

    def dropped(self, request_id: str, now: float) -> list[Action]:
        """Drop a request that is gone from this stage; work begun for it goes on only for others."""
        self._following.pop(request_id, None)
        if request_id in self._leader:
            return []
        self.take_out(request_id)
        work = self.running.pop(request_id, None)
        if work is None:
            return []
        self._end(work, now)
        self.merger.leave(request_id)
        return [Gone(work)]

    def regrouped(self, request_id: str, receivers: Sequence[str]) -> None:
        """Form a group again for work that has ended here and is to run again, for all receivers of its output."""
        if self.merger.members(self._leader.get(request_id, request_id)):
            return  # it has not ended here
        self.merger.regroup(receivers[0], receivers[1:])
        if receivers[0] != request_id:
            self._leader[request_id] = receivers[0]
            self._begun_for[receivers[0]] = request_id

    def renamed(self, request_id: str) -> None:
        """Forget that work was begun for a request that has left: its present leader will run under its own name."""
        leader = self._leader.pop(request_id, None)
        if leader is not None:
            self._begun_for.pop(leader, None)

    # ---- replicas

    def replica_up(self, replica_id: int, host: str = HERE) -> None:
        """Add a replica that is new or was restarted, on a host."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            replica = self.replicas[replica_id] = StageReplica(self._new_load())
        replica.up, replica.suspected = True, False
        replica.standby = host in self._context.standby
        self._context.links.place(self.stage_id, replica_id, host)
        self._availability_changed(replica_id, replica)

    def _new_load(self) -> ReplicaLoad:
        if not self._controls:
            return ReplicaLoad(self._max_num_seqs)
        batching, limits = self._context.config.batching, self._limits
        control = control_of(batching, limits, self._max_num_seqs)
        return ReplicaLoad(self._max_num_seqs, control, window_of(batching, limits))

    def replica_down(self, replica_id: int) -> None:
        """Give a replica no requests any more; those that it has are still counted."""
        replica = self.replicas.get(replica_id)
        if replica is not None:
            replica.up = False
            self._availability_changed(replica_id, replica)

    def replica_died(self, replica_id: int, now: float) -> list[Action]:
        """Forget a dead replica's caches and requests; requests that were never sent to it wait again."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            return []
        lost, replica.works = list(replica.works.values()), {}
        replica.load = self._new_load()
        replica.up = replica.draining = False
        self._availability_changed(replica_id, replica)
        self._forget(replica_id)
        actions: list[Action] = []
        for work in lost:
            del self.running[work.request_id]
            work.reset()
            if not work.sent:
                self._put(work, now)
            actions.append(Lost(work, replica_id, waits=not work.sent))
        return actions

    def replica_gone(self, replica_id: int) -> None:
        """Remove a replica that has left for good."""
        gone = self.replicas.pop(replica_id, None)
        if gone is not None:
            self._index.remove(replica_id)
            self._forget(replica_id)
            self._context.links.forget(self.stage_id, replica_id)
            self._need_standbys()

    def _forget(self, replica_id: int) -> None:
        """Forget what was learnt of a replica whose place another one may take."""
        self.speeds.forget(replica_id)
        book = self._context.affinity.get(self.stage_id)
        if book is not None:
            book.forget(replica_id)

    def mark(self, replica_id: int, *, draining: bool | None = None, suspected: bool | None = None) -> None:
        """Record that a replica is drained or suspected, or no longer; unknown ones are ignored."""
        replica = self.replicas.get(replica_id)
        if replica is None:
            return
        if draining is not None:
            replica.draining = draining
        if suspected is not None:
            replica.suspected = suspected
        self._availability_changed(replica_id, replica)

    def _availability_changed(self, replica_id: int, replica: StageReplica) -> None:
        """Update what follows from a replica that begins to serve, or no longer does."""
        self._changed(replica_id, replica)
        if self._context.standby:
            self._need_standbys()

    def _need_standbys(self) -> None:
        """Let replicas on standby hosts serve while no other one does (rule 8)."""
        others = any(one.up and not (one.suspected or one.draining or one.standby) for one in self.replicas.values())
        for replica_id, one in self.replicas.items():
            if one.spare != (one.standby and others):
                one.spare = not one.spare
                self._changed(replica_id, one)

    @property
    def _ahead(self) -> int:
        """Return how many requests may wait in an engine (rule 5)."""
        if len(self.replicas) > 1 or self._context.mixed:
            return self._few_ahead
        return self._max_num_seqs if self._few_ahead else 0

    def _changed(self, replica_id: int, replica: StageReplica) -> None:
        """Update the index after a change of a replica, its load or its limit."""
        if replica.serves:
            self._index.put(replica_id, len(replica.works), replica.load.limit(self._ahead))
        else:
            self._index.remove(replica_id)

    # ---- decisions

    def release(self, now: float) -> list[Action]:
        """Start all requests that can start now."""
        actions: list[Action] = []
        while self._queue:
            found, wake_at = self._release_some(now)
            if wake_at is not None and wake_at < self._wake_at:
                self._wake_at = max(wake_at, now)
                actions.append(Wake(self.stage_id, self._wake_at))
            if not found:
                break
            for one in found:
                if isinstance(one, Release):
                    name, replica_id, reason = one.request_id, one.replica_id, one.reason
                    actions.append(self._begin(self.waiting.pop(name), replica_id, reason, now))
                else:
                    actions.append(self._begin(self.waiting.pop(one[0]), one[1], None, now))
            if isinstance(found[0], Release) and not self._draws():
                break  # the gate has seen all replicas, and filled them
        return actions

    def _release_some(self, now: float) -> tuple[Sequence[Release | tuple[str, int]], float | None]:
        def prepared(replica_id: int) -> ReplicaState | None:
            replica = self.replicas.get(replica_id)
            usable = replica is not None and replica.up and not replica.suspected
            return self._state(replica_id, now) if usable else None

        draws = self._draws()
        if draws:

            def described(replica_id: int) -> ReplicaState | None:
                return self._state(replica_id, now) if replica_id in self._index else None

            return self._queue.release(now, drawn(self._index, described, self._context.rng), described, prepared)
        states = [self._state(replica_id, now, draws) for replica_id, one in self.replicas.items() if one.serves]
        if not any(state.room for state in states):
            states = []
        return self._queue.release(now, states, None, prepared)

    def woken(self, at: float) -> bool:
        """Return whether a `Wake` is due, and forget it."""
        if at != self._wake_at:
            return False
        self._wake_at = float("inf")
        return True

    def choose(self, now: float) -> int | None:
        """Choose a replica for a request that does not wait; None: there is no choice to make."""
        if self._draws():
            states = drawn(self._index, lambda one: self._state(one, now), self._context.rng, even_full=True)
        elif self.num_up < 2:
            return None
        else:
            states = [self._state(replica_id, now) for replica_id, one in self.replicas.items() if one.serves]
        return self.gate.balancer.pick(0.0, states, self._context.rng).replica_id if states else None

    def _begin(self, work: StageWork, replica_id: int, reason: ReleaseReason | None, now: float) -> Start:
        replica, keys = self.replicas[replica_id], work.known.keys
        work.replica_id, work.started, work.runs, work.sent = replica_id, now, work.runs + 1, False
        self.running[work.request_id] = replica.works[work.request_id] = work
        replica.load.begin(work.request_id, work.cost_seconds, now, self._units(work))
        self._changed(replica_id, replica)
        work.known.replicas[self.stage_id] = replica_id
        book = self._context.affinity.get(self.stage_id)
        warm = None
        if book is not None and keys:
            warm = book.has_any(replica_id, keys)
            book.note(replica_id, keys)
        return Start(work, reason, warm)

    def _draws(self) -> bool:
        """Return whether a few replicas are drawn instead of considering all."""
        return draws(len(self.replicas), self.gate.balancer)

    def _state(self, replica_id: int, now: float, draws: bool | None = None) -> ReplicaState:
        """Return a replica as the gate sees it. ``draws``: whether a few are drawn, if the caller knows."""
        load = self.replicas[replica_id].load
        ahead = self._ahead
        work, window, limit = load.work, load.window, load.limit(ahead)
        running = len(work)
        look = not ahead and running and self._first_output
        # each drawn replica gets at most one, so that it matters only whether there is room at all
        if look and (running >= limit or not (self._draws() if draws is None else draws)):
            limit = load.limit(work.next_end_seconds(now) <= LEAD_SECONDS)
        remaining = work.remaining_seconds(now)
        if window is None:
            return ReplicaState(replica_id, remaining, running, limit, work.speed)
        return ReplicaState(
            replica_id, remaining, running, limit, work.speed, units=window.running, units_limit=window.units
        )

    def _source_of(self, work: StageWork) -> int | None:
        """Return the replica of the previous stage that made the request's input."""
        return None if self._source is None else work.known.replicas.get(self._source)

    def _distances(self, work: StageWork) -> Mapping[int, float]:
        source, links = self._source_of(work), self._context.links
        if source is None or self._source is None or not links.knows_speeds():
            return {}
        return links.distances((self._source, source), self.stage_id, self.replicas)

    def _units(self, work: StageWork) -> int:
        return units_of(self._kind, work.known.features[self.stage_id])

    def _long_units(self, work: StageWork) -> int:
        return self._window.counted(self._units(work)) if self._window is not None else 0

    def _warm(self, work: StageWork) -> Mapping[int, float]:
        book, keys = self._context.affinity.get(self.stage_id), work.known.keys
        if book is None or not keys:
            return {}
        return book.warm(keys, book.holders(keys, CHOICES if self._draws() else None))

    def _saved_seconds(self, work: StageWork) -> Mapping[int, float] | None:
        """Return what replicas save of a request's encodes (rule 7); None while that is not learnt."""
        book, keys = self._context.affinity.get(self.stage_id), work.known.item_keys
        seconds = self._context.costs.encode_seconds(self._name, work.known.features[self.stage_id])
        if book is None or seconds is None:
            return None
        shares = book.warm(keys, book.holders(keys, CHOICES if self._draws() else None))
        return {replica_id: seconds * share for replica_id, share in shares.items()}

    # ---- conservation

    def validate(self) -> None:
        """Check the laws of conservation; O(n), for tests.

        Raises:
            AssertionError: one is broken; the message names the stage and what is wrong.
        """
        where = f"stage {self.stage_id}"
        waiting, running = self.waiting.keys(), self.running.keys()
        assert waiting.isdisjoint(running), f"{where}: {waiting & running} wait and run"
        assert set(self._following).isdisjoint(waiting | running), f"{where}: followers wait or run"
        assert len(self._queue) == len(waiting - self.held), f"{where}: the queue lost a request"
        for name in waiting - self.held:
            assert name in self._queue, f"{where}: {name} waits and is not queued"
        on_replicas = {name: one for replica in self.replicas.values() for name, one in replica.works.items()}
        assert on_replicas.keys() == running, f"{where}: running work is on no replica, or the reverse"
        for replica_id, replica in self.replicas.items():
            assert len(replica.works) == len(replica.load), f"{where} replica {replica_id}: load and works differ"
            assert (replica_id in self._index) == replica.serves, f"{where} replica {replica_id}: wrong in the index"
            for work in replica.works.values():
                assert work.replica_id == replica_id, f"{where}: {work.request_id} runs elsewhere"
        for name, work in self.waiting.items():
            assert work.replica_id == UNPLACED, f"{where}: {name} waits and has a replica"
        for name in self._following:
            assert self.merger.leader(name) != name, f"{where}: {name} follows nobody"
        assert self._begun_for == {leader: name for name, leader in self._leader.items()}, f"{where}: leaders differ"

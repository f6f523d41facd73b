"""Hold the policies of one stage: which requests to release, and to which replica."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.graph.merging import Joined, Merger, Role
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.monitor.forecast.plan import PoolState
from vllm_omni_sched.omni.stages.entrance import AS_THEY_CAME, Entrance, Sights
from vllm_omni_sched.omni.stages.limits import ReplicaLoad
from vllm_omni_sched.omni.stages.work import Work
from vllm_omni_sched.resource.balance import CHOICES, Balancer, CostBalancer, LeastQueue, ReplicaState, RoundRobin
from vllm_omni_sched.resource.replica_index import ReplicaIndex, drawn, draws
from vllm_omni_sched.resource.stage_gate import StageGate
from vllm_omni_sched.resource.stage_limits import control_of, units_of, window_of
from vllm_omni_sched.resource.topology import Topology
from vllm_omni_sched.stage_options import BalancePolicy, StageSchedConfig

SMOOTHING = 0.1  # weight of the last request
LEAD_SECONDS = 0.06  # for a request to get from here to an engine

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.policies import Policies


class StagePolicies:
    """The policies of one stage: which requests to release, and to which replica.

    Up to `LOOK_AT_ALL` replicas, all are considered for each decision. Of more, `CHOICES` are drawn for each request
    released: idle ones first, then others with room; and as many of the warmest. Only a round-robin balancer
    considers all.
    """

    def __init__(self, shared: Policies, pool: Any) -> None:
        self._shared, self._stage_id = shared, pool.stage_id
        config, stage = shared.config, shared.graph.stage(pool.stage_id)
        self._kind = stage.kind
        self._first_output = stage.kind is StageKind.AR
        limits = config.batching.of_stage(stage.stage_id, stage.name)
        self._limits = limits
        self._most = pool.at_once
        self._loads: dict[int, ReplicaLoad] = {}
        self._index = ReplicaIndex()  # of a stage whose replicas are drawn
        self._latest = 0.0
        self._source = max(shared.graph.stage(pool.stage_id).sources, default=None)
        self._topology = Topology()
        self._window = window_of(config.batching, limits)  # only tells what is long
        priority = config.graph.priority
        self._gate = StageGate(
            _balancer(config),
            max_hold_seconds=limits.hold_ms / 1e3 if self._holds(stage.kind) else 0.0,
            min_share=priority.min_low_share if priority.enabled else 0.0,
            order=shared.order.order if priority.enabled else AS_THEY_CAME,
        )
        sights = Sights(self._long_units, self._warm, self._distances)
        self._entrance = Entrance(shared, pool.stage_id, self._gate, sights, as_they_came=not priority.enabled)
        self.request_seconds: float | None = None  # replica time of a request

    @staticmethod
    def _holds(kind: StageKind) -> bool:
        """Return whether batches may be held; autoregressive stages admit requests at each step and need no batches."""
        return kind is not StageKind.AR

    def merger(self) -> Merger:
        return Merger(self._shared.config.graph.merging.max_followers)

    def load(self, replica_id: int) -> ReplicaLoad:
        if replica_id not in self._loads:
            limits, batching = self._limits, self._shared.config.batching
            self._loads[replica_id] = ReplicaLoad(
                control_of(batching, limits, self._most),
                window_of(batching, limits),
                target_seconds=limits.target_latency_ms / 1e3,
            )
        return self._loads[replica_id]

    # ---- what happens

    def came(self, work: Work, joined: Joined, now: float) -> None:
        shared = self._shared
        if joined.role is Role.FOLLOW:
            shared.board.merged(self._stage_id)
            if shared.credits is not None:  # another request's work takes the place here
                shared.credits.give_back(work.request_id, str(self._stage_id))
                shared.credits_changed(work.request_id, now)
        before, here = str(self._stage_id - 1), str(self._stage_id)
        if shared.credits is not None and shared.credits.has_started(work.request_id, before):
            shared.credits.hand_over(work.request_id, before, here)

    def waits(self, pool: Any, work: Work, now: float) -> None:
        """Add a work that may be released from now on."""
        self._entrance.put(pool, work, now)

    def waits_no_more(self, request_id: str) -> None:
        """Remove a work that was withdrawn or is held; unknown ones are ignored."""
        self._entrance.remove(request_id)

    def credits_changed(self, request_id: str, now: float) -> None:
        """Update a request after credits were taken or given back for it, here or elsewhere."""
        self._entrance.credits_changed(request_id, now)

    def began(self, work: Work) -> None:
        now = work.started or 0.0
        load, board = self.load(work.replica_id), self._shared.board
        load.begin(work.request_id, work.cost_seconds, now, self._units(work))
        work.known.replicas[self._stage_id] = work.replica_id
        self._shared.watch.began(work, now)
        self._shared.credits_changed(work.request_id, now)
        board.submitted(self._stage_id, work.replica_id, work.request_id, work.arrived)
        board.started(self._stage_id, work.replica_id, work.request_id, now)
        self._changed(work.replica_id, now)
        board.batch(self._stage_id, work.replica_id, len(load))
        board.batch_limit(self._stage_id, work.replica_id, load.limit.limit)
        book = self._shared.affinity.get(self._stage_id)
        if book is not None and work.known.keys:
            board.looked_up(self._stage_id, work.replica_id, self._warm(work).get(work.replica_id, 0.0) > 0)
            book.note(work.replica_id, work.known.keys)

    def spoke(self, work: Work, now: float) -> None:
        """Record the first output of a work."""
        if self._first_output and work.started is not None:
            load = self.load(work.replica_id)
            load.look_at(self._shared.memory, now)
            load.through(work.request_id, now, max(now - work.started, 0.0))
            self._changed(work.replica_id, now)

    def finished(self, work: Work, now: float) -> None:
        load, shared = self.load(work.replica_id), self._shared
        if work.started is not None and not self._first_output:
            load.look_at(shared.memory, now)
            load.through(work.request_id, now, max(now - work.started, 0.0))
        share = load.end(work.request_id, now)
        self._changed(work.replica_id, now)
        if share is not None and work.started is not None:
            shared.costs.observe(str(self._stage_id), work.known.features[self._stage_id], share)
            self._topology.observe(self._source_of(work), work.replica_id, work.cost_seconds, share)
            load.speed = self._topology.speed(work.replica_id)
            before = share if self.request_seconds is None else self.request_seconds
            self.request_seconds = before + SMOOTHING * (share - before)
        shared.board.finished(self._stage_id, work.replica_id, work.request_id, now)
        shared.watch.ended(work, now, well=True)
        self._done(work, now)

    def gone(self, work: Work, now: float) -> None:
        """Record that a work has left without a result."""
        self.load(work.replica_id).end(work.request_id, now)
        self._changed(work.replica_id, now)
        self._shared.board.aborted(self._stage_id, work.replica_id, work.request_id)
        self._shared.watch.ended(work, now, well=False)
        self._done(work, now)

    def lost(self, work: Work, now: float) -> None:
        """Record that the replica of a work died; the request keeps its credits."""
        self._changed(work.replica_id, now)
        self._shared.watch.ended(work, now, well=False)
        self._shared.board.redispatched(self._stage_id, work.replica_id)

    def _done(self, work: Work, now: float) -> None:
        credits = self._shared.credits
        if credits is not None:
            credits.give_back(work.request_id, str(self._stage_id))
            self._shared.credits_changed(work.request_id, now)
            self._shared.board.credits(self._stage_id, credits.free(str(self._stage_id)))

    def died(self, replica_id: int) -> None:
        """Forget the state of a dead replica, whose caches are lost."""
        self._shared.board.lost(self._stage_id, replica_id)
        self._loads.pop(replica_id, None)
        if replica_id in self._index:
            self._index.put(replica_id, 0, 1)
        self._topology.forget(replica_id)
        self._shared.source_died(self._stage_id, replica_id)
        book = self._shared.affinity.get(self._stage_id)
        if book is not None:
            book.forget(replica_id)

    def source_died(self, replica_id: int) -> None:
        """Forget a dead replica of the previous stage."""
        self._topology.forget_source(replica_id)

    def pool_state(self, requests_per_second: float) -> PoolState | None:
        """Return the stage's state for the planner of replicas; None before anything has run here."""
        if not self.request_seconds or not self._loads:
            return None
        return PoolState(
            len(self._loads),
            capacity=1 / self.request_seconds,
            forecast=requests_per_second,
            batch_limit=min(load.limit.limit for load in self._loads.values()),
        )

    def raise_limits(self, limit: int) -> None:
        for replica_id, load in self._loads.items():
            load.raise_limit(limit)
            self._changed(replica_id, self._latest)

    # ---- what to do

    def release(self, pool: Any, now: float) -> list[tuple[str, int]]:
        """Return the requests to start now with their replicas; they no longer wait."""
        if not self._draws(pool):
            replicas = self._replicas(pool, now)
            return self._entrance.release(pool, replicas, now) if any(one.room for one in replicas) else []

        def described(replica_id: int) -> ReplicaState | None:
            return self._staying(pool, replica_id, now)

        return self._entrance.release(pool, self._drawn(pool, now), now, described)

    def choose(self, pool: Any, work: Work | None, running: Mapping[str, Work]) -> int | None:
        """Choose a replica for a request that does not wait."""
        # vLLM-Omni also calls this from another thread
        now = self._latest
        if self._draws(pool):
            replicas = self._drawn(pool, now, even_full=True)
        else:
            live = self._replicas(pool, now)
            replicas = [one for one in live if one.replica_id not in pool.draining]
            if len(pool.live_replica_ids()) < 2:
                return None
        if not replicas:
            return None
        return self._gate.balancer.pick(0.0, replicas, self._shared.dice).replica_id

    def _source_of(self, work: Work) -> int | None:
        """Return the replica of the previous stage that made the request's input."""
        return None if self._source is None else work.known.replicas.get(self._source)

    def _distances(self, work: Work) -> Mapping[int, float]:
        return self._topology.distances(self._source_of(work))

    def _units(self, work: Work) -> int:
        return units_of(self._kind, work.known.features[self._stage_id])

    def _long_units(self, work: Work) -> int:
        return self._window.counted(self._units(work)) if self._window is not None else 0

    def _warm(self, work: Work) -> Mapping[int, float]:
        book = self._shared.affinity.get(self._stage_id)
        keys = work.known.keys
        if book is None or not keys:
            return {}
        return book.warm(keys, book.holders(keys, CHOICES if len(self._index) else None))

    def _changed(self, replica_id: int, now: float) -> None:
        """Update a replica whose load or limit has changed."""
        self._latest = max(self._latest, now)
        if replica_id in self._index:
            load = self.load(replica_id)
            self._index.put(replica_id, len(load), load.limit.limit)

    def _draws(self, pool: Any) -> bool:
        """Return whether a few replicas are drawn instead of considering all."""
        return draws(pool.num_replicas, self._gate.balancer)

    def _replicas(self, pool: Any, now: float) -> list[ReplicaState]:
        found = (self._described(pool, replica_id, now) for replica_id in pool.live_replica_ids())
        return [one for one in found if one is not None]

    def _drawn(self, pool: Any, now: float, even_full: bool = False) -> list[ReplicaState]:
        """Return a few of the replicas, as chosen by `drawn`."""
        for replica_id in range(len(self._index), pool.num_replicas):
            load = self.load(replica_id)
            self._index.put(replica_id, len(load), load.limit.limit)
        return drawn(self._index, lambda one: self._staying(pool, one, now), self._shared.dice, even_full)

    def _staying(self, pool: Any, replica_id: int, now: float) -> ReplicaState | None:
        """Return the state of a replica; None if it should get no request or is being drained."""
        return self._described(pool, replica_id, now) if replica_id not in pool.draining else None

    def _described(self, pool: Any, replica_id: int, now: float) -> ReplicaState | None:
        """Return the state of a replica; None if it should get no request."""
        if not pool.is_replica_available(replica_id) or replica_id in pool.suspected:
            return None
        load = self.load(replica_id)
        window, in_flight, limit = load.window, len(load), load.limit.limit
        if in_flight >= limit or not len(self._index):  # each drawn replica gets at most one request
            limit += self._ahead(load, now)
        return ReplicaState(
            replica_id,
            load.remaining_seconds(now),
            in_flight,
            limit=limit,
            speed=load.speed,
            units=window.running if window is not None else 0,
            units_limit=window.units if window is not None else None,
        )

    def _ahead(self, load: ReplicaLoad, now: float) -> int:
        """Return 1 if a place is about to be free, so that it is not empty until the next request arrives, else 0."""
        return int(self._first_output and load.next_end_seconds(now) <= LEAD_SECONDS)


def _balancer(config: StageSchedConfig) -> Balancer:
    match config.balancing.policy:
        case BalancePolicy.COST:
            return CostBalancer(affinity_slack=config.balancing.affinity_slack)
        case BalancePolicy.LEAST_QUEUE:
            return LeastQueue()
        case _:
            return RoundRobin()  # like vLLM-Omni for its own replicas

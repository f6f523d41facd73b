"""Create the policies of all stages from the options, and pass events on to them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from random import Random  # noqa: TID251 (the type of an argument)
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from vllm_omni_sched.engine.metrics_bridge import PagePublisher, attach
from vllm_omni_sched.graph.affinity import AffinityBook
from vllm_omni_sched.graph.order import Undated
from vllm_omni_sched.graph.path_order import PathOrder
from vllm_omni_sched.graph.stages import StageGraph
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.anomaly.finding import AnomalyKind
from vllm_omni_sched.monitor.forecast.plan import Move, MoveReason, PoolState
from vllm_omni_sched.monitor.recovery.events import FailReason, Incident, IncidentKind, Replica
from vllm_omni_sched.monitor.recovery.options import recovery_options
from vllm_omni_sched.monitor.recovery.policy import Recovery
from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.monitor.stage_metrics import StageCollector
from vllm_omni_sched.omni.stages.foresight import Foresight
from vllm_omni_sched.omni.stages.layout import Layout
from vllm_omni_sched.omni.stages.memory import HostMemory
from vllm_omni_sched.omni.stages.moves import Moves, Outcome
from vllm_omni_sched.omni.stages.requests import Classes, Known, bytes_of, features_of, keys_of, modality_of
from vllm_omni_sched.omni.stages.stage_policies import StagePolicies
from vllm_omni_sched.omni.stages.unwatched import Unwatched
from vllm_omni_sched.omni.stages.watch import Watch
from vllm_omni_sched.omni.stages.work import Work
from vllm_omni_sched.resource.credits import Credits
from vllm_omni_sched.resource.modality_pools import Grant, Pools, RefusalReason, ShareReason
from vllm_omni_sched.resource.stage_cost import StageCosts
from vllm_omni_sched.stage_options import StageSchedConfig

logger = get_logger(__name__)

SHARES_SECONDS = 5.0  # between two checks of the modalities' demand: three in a row must differ before shares move


class Policies:
    """State and policies that all stages share.

    Args:
        config: the options.
        graph: the stages.
        async_chunk: whether all stages of a request run at once.
        dice: random source.
    """

    def __init__(self, config: StageSchedConfig, graph: StageGraph, async_chunk: bool, dice: Random) -> None:
        self.config, self.graph, self.dice, self._together = config, graph, dice, async_chunk
        self.costs, self.memory = StageCosts(), HostMemory()
        self.classes = Classes(config.graph.priority)
        priority = config.graph.priority
        self.order = PathOrder(
            graph,
            default=self.classes.default,
            max_wait_seconds=priority.max_wait_seconds,
            undated=Undated(priority.without_deadline),
        )
        self.affinity: dict[int, AffinityBook[int]] = {
            stage.stage_id: AffinityBook(config.graph.affinity.capacity)
            for stage in graph.stages
            if config.graph.affinity.enabled
        }
        limits = config.runtime.credits
        self.credits = None if async_chunk or not limits.enabled else _credits(graph, limits.capacity)
        self.board = StageBoard(
            [stage.stage_id for stage in graph.stages],
            anomalies=[kind.value for kind in AnomalyKind],
            incidents=[kind.value for kind in IncidentKind],
            reasons=[reason.value for reason in FailReason],
        )
        forecast = config.monitoring.forecast
        self.foresight = Foresight(forecast, self.board, config.batching.max_batch_size) if forecast.enabled else None
        self.pools = _pools(config)
        self.grants: dict[str, Grant] = {}
        self._shares_due = -math.inf
        watch = Watch if config.monitoring.enabled else Unwatched
        self.watch = watch(config.monitoring.anomaly, graph, self.board)
        self.merges = config.graph.merging.enabled
        self.known: dict[str, Known] = {}
        self._waived: set[str] = set()  # requests that need no credits any more
        self._stages: dict[int, StagePolicies] = {}

    def of(self, pool: Any) -> StagePolicies:
        """Return the policies of one stage."""
        if pool.stage_id not in self._stages:
            self._stages[pool.stage_id] = StagePolicies(self, pool)
        return self._stages[pool.stage_id]

    def recovery(self, pools: Any) -> Recovery | None:
        options = self.config.runtime.recovery
        if not options.enabled:
            return None
        replicas = {Replica(pool.stage_id, i): float("inf") for pool in pools for i in range(pool.num_replicas)}
        return Recovery(
            replicas,
            # if all stages run at once, none waits for the output of another
            {} if self._together else {stage.stage_id: stage.sources for stage in self.graph.stages},
            recovery_options(options),
            self.dice,
        )

    def arrived(self, message: Any, now: float) -> None:
        """Record that a request has arrived at the pipeline."""
        params = message.sampling_params_list
        modality = modality_of(message.prompt)
        sla = self.classes.of(params[0], modality)
        known = Known(
            message.request_id,
            now,
            sla,
            self.classes.is_low(sla),
            getattr(message.prompt, "priority", 0) or 0,
            modality,
            keys_of(message.prompt, params[0]),
            bytes_of(message.prompt),
        )
        for stage in self.graph.stages[: message.final_stage_id + 1]:
            features = features_of(
                message.prompt if stage.stage_id in self.graph.entries else None, params[stage.stage_id]
            )
            known.features[stage.stage_id] = features
            known.costs[stage.stage_id] = self.costs.estimate(str(stage.stage_id), features)
        self.known[message.request_id] = known
        if self.foresight is not None:
            self.foresight.arrived(modality)

    def left(self, request_id: str, now: float) -> None:
        """Forget a request that has left the pipeline, and free what it held."""
        known = self.known.pop(request_id, None)
        if self.foresight is not None and known is not None:
            self.foresight.ways.left(known.modality, known.replicas)
        if self.pools is not None and (grant := self.grants.pop(request_id, None)) is not None:
            self.pools.release(grant)
        if self.credits is not None:
            self.credits.give_back(request_id)
            self._waived.discard(request_id)

    def credits_needed(self, stage_id: int, request_id: str) -> tuple[str, ...]:
        """Return the stages that must have a credit for the request to start in a stage."""
        if self.credits is None or request_id in self._waived:
            return ()
        return self.credits.needed(str(stage_id), request_id)

    def take_credits(self, stage_id: int, request_id: str) -> bool:
        """Take the credits for a request to start in a stage, and return whether it may start."""
        if self.credits is None or request_id in self._waived:
            return True
        return self.credits.take(str(stage_id), request_id)

    def waive_credits(self, request_id: str, now: float) -> None:
        """Give back the credits of a request that returns to an earlier stage; it needs none from then on.

        It has waited for them once. If it waited again, the requests that hold the credits might wait for it.
        """
        if self.credits is not None and request_id in self.known:
            self._waived.add(request_id)
            self.credits.give_back(request_id)
            self.credits_changed(request_id, now)

    def describe(self, pool: Any, request_id: str, state: Any, request: Any, how: dict[str, Any], now: float) -> Work:
        """Describe a submission to a stage as a `Work`, with its estimated cost."""
        stage_id = pool.stage_id
        known = self.known.get(request_id)
        if known is None:  # it did not arrive in the normal way
            sla = self.classes.default
            known = self.known[request_id] = Known(request_id, now, sla, False, 0, "text", frozenset(), 0)
        features = features_of(request, state.sampling_params_list[stage_id])
        known.features[stage_id] = features
        cost = known.costs[stage_id] = self.costs.estimate(str(stage_id), features)
        if known.priority and getattr(request, "priority", None) == 0:
            request.priority = known.priority  # vLLM-Omni passes it to the first stage only
        return Work(request_id, stage_id, state, request, how, known, now, cost)

    def source_died(self, stage_id: int, replica_id: int) -> None:
        """Forget a replica whose place another one may take."""
        for after in self.graph.successors(stage_id):
            if after in self._stages:
                self._stages[after].source_died(replica_id)

    def has_memory(self, request_id: str) -> bool:
        """Reserve memory for the request in the pool of its modality, and return whether there was room."""
        if self.pools is None or not self.waits_for_memory(request_id):
            return True
        known = self.known[request_id]
        answer = self.pools.reserve(known.modality, known.nbytes)
        if isinstance(answer, Grant):
            self.grants[request_id] = answer
            return True
        return answer.reason is RefusalReason.TOO_LARGE  # it would wait forever; the stage's own limits apply

    def waits_for_memory(self, request_id: str) -> bool:
        """Return whether `has_memory` has anything to reserve."""
        known = self.known.get(request_id)
        return self.pools is not None and known is not None and known.nbytes > 0 and request_id not in self.grants

    def credits_changed(self, request_id: str, now: float) -> None:
        """Tell the stages that credits were taken or given back for a request, so that its needs may have changed."""
        for stage in self._stages.values():
            stage.credits_changed(request_id, now)

    def tick(self, now: float) -> None:
        """Move the shares of the pools towards the demand once per interval."""
        if self.pools is None or now < self._shares_due:
            return
        self._shares_due = now + SHARES_SECONDS
        if self.pools.adapt() is ShareReason.MOVED:
            shares = ", ".join(f"{modality} {share:.0%}" for modality, share in self.pools.shares.items())
            logger.info("memory pools: guaranteed shares are now %s", shares)

    def incident(self, incident: Incident) -> None:
        logger.warning(
            "stage %d replica %d: %s%s%s",
            incident.replica.stage,
            incident.replica.index,
            incident.kind.value,
            f", {incident.requests} requests" if incident.requests else "",
            f" ({incident.cause})" if incident.cause else "",
        )
        self.board.incident(incident.replica.stage, incident.replica.index, incident.kind.value)

    def prepare(self, rates: Mapping[int, float], tested: bool, moves: Moves, now: float) -> None:
        """Raise batch limits for the forecast requests per second by stage, and move replicas or report missing ones.

        Replicas move only if the options allow it, the forecast was ``tested``, and no move is in progress.
        """
        assert self.foresight is not None
        may_move = self.config.monitoring.forecast.move_replicas and tested and not moves.busy
        states = {}
        for stage_id, stage in self._stages.items():
            state = stage.pool_state(rates.get(stage_id, 0.0))
            if state is not None:
                states[str(stage_id)] = self._with_replicas(state, stage_id, moves) if may_move else state
        plans, wanted = self.foresight.plan(states, len(moves.places.spare) if may_move else 0, now)
        for name, plan in plans.items():
            self._stages[int(name)].raise_limits(plan.batch_limit)
            if plan.reason is MoveReason.SHORT:
                logger.warning(
                    "stage %s: the forecast of %.3g requests per second needs more than %d replicas",
                    self.graph.stage(int(name)),
                    rates[int(name)],
                    plan.replicas,
                )
        if may_move:  # one; the next ones are planned once it is done
            any(self._begins(move, moves) for move in wanted)

    def _with_replicas(self, state: PoolState, stage_id: int, moves: Moves) -> PoolState:
        """Return the state with the actual number of replicas, even those that have not run anything."""
        most = self.config.monitoring.forecast.max_replicas
        return replace(state, replicas=moves.count(stage_id), maximum=most)

    def _begins(self, move: Move, moves: Moves) -> bool:
        """Begin a move, and return whether it could begin."""
        source = None if move.source is None else moves.idlest(int(move.source))
        if move.source is None:
            assert move.target is not None
            how = moves.take_spare(int(move.target))
        elif source is None:
            return False
        elif move.target is None:
            how = moves.give_up(source)
        else:
            how = moves.hand_over(source, int(move.target))
        names = move.source or "none", move.target or "none"
        logger.info("replica from stage %s to %s: %s", *names, how.value if isinstance(how, Outcome) else "move begins")
        return not isinstance(how, Outcome)

    def layout(self, moves: Moves) -> Layout | None:
        """Return the layout that places stages on devices, None if that is off."""
        options = self.config.graph.partition
        names = {stage.stage_id: stage.name for stage in self.graph.stages}
        return Layout(options, moves, self.board, self._seconds, names) if options.enabled else None

    def _seconds(self, stage_id: int) -> float | None:
        stage = self._stages.get(stage_id)
        return None if stage is None else stage.request_seconds

    def publish(self) -> PagePublisher | ExitStack:
        """Publish the metrics on /metrics of this process if monitoring is on; the caller closes the result."""
        if not self.config.monitoring.enabled:
            return ExitStack()
        attach()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StageCollector(self.board))
        publisher = PagePublisher("stages", {}, lambda: generate_latest(registry))
        publisher.start()
        return publisher


def _pools(config: StageSchedConfig) -> Pools | None:
    options = config.pools
    return None if options.total_bytes is None else Pools(options.total_bytes, options.shares.model_dump())


def _credits(graph: StageGraph, capacity: int) -> Credits:
    successors = {str(one.stage_id): [str(after) for after in graph.successors(one.stage_id)] for one in graph.stages}
    return Credits(successors, dict.fromkeys(successors, capacity))

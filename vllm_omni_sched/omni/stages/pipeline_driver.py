"""Connect the pipeline core to vLLM-Omni: describe its requests, and publish what happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from random import Random  # noqa: TID251 (the type of an argument)
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest

from vllm_omni_sched.clock import Clock, wall_seconds
from vllm_omni_sched.config.stage_options import StageSchedConfig
from vllm_omni_sched.core.pipeline import events as e
from vllm_omni_sched.core.pipeline.context import PipelineContext
from vllm_omni_sched.core.pipeline.core import PipelineCore
from vllm_omni_sched.core.pipeline.requests import PipelineRequest
from vllm_omni_sched.engine.metrics.bridge import PagePublisher, attach
from vllm_omni_sched.graph.flow import FlowPlan, RequestFlow
from vllm_omni_sched.graph.stages import StageGraph
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.anomaly.finding import Anomaly, AnomalyKind
from vllm_omni_sched.monitor.forecast.plan import Move, MoveReason, PoolState
from vllm_omni_sched.monitor.recovery.events import FailReason, Incident, IncidentKind, Replica
from vllm_omni_sched.monitor.recovery.remedies import RemedyAction, RemedyStep
from vllm_omni_sched.monitor.stage_board import StageBoard
from vllm_omni_sched.monitor.stage_metrics import StageCollector
from vllm_omni_sched.omni.stages.placement.forecaster import Forecaster
from vllm_omni_sched.omni.stages.placement.layout import StageLayout
from vllm_omni_sched.omni.stages.placement.replica_migrator import MigrationOutcome, ReplicaMigrator
from vllm_omni_sched.omni.stages.queue import StageQueue
from vllm_omni_sched.omni.stages.reports.fault_journal import FaultJournal
from vllm_omni_sched.omni.stages.reports.memory import HostMemory
from vllm_omni_sched.omni.stages.reports.report_reader import Moved
from vllm_omni_sched.omni.stages.reports.stage_monitor import NullMonitor, StageMonitor
from vllm_omni_sched.omni.stages.requests import Classes, features_of, keys_of, modality_of
from vllm_omni_sched.omni.stages.work import Work

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.pool import ScheduledPool
    from vllm_omni_sched.omni.stages.recovery.recovery_driver import RecoveryDriver

logger = get_logger(__name__)


class PipelineDriver:
    """Drives the pipeline core for all stages, and adds metrics, anomaly detection and forecasts to it.

    Args:
        config: the options.
        graph: the stages.
        async_chunk: whether all stages of a request run at once, if they are a line; otherwise the graph says which
            exchange chunks.
        rng: random source.
        wall: the wall clock, for the journal of faults.
    """

    def __init__(
        self,
        config: StageSchedConfig,
        graph: StageGraph,
        async_chunk: bool,
        rng: Random,
        wall: Clock = wall_seconds,
    ) -> None:
        self.config, self.graph = config, graph
        self.memory = HostMemory() if config.batching.has_target else None
        self.classes = Classes(config.graph.priority)
        self.context = PipelineContext(config, graph, rng, together=async_chunk and not graph.branches)
        self.core = PipelineCore(self.context)
        self._lock = threading.RLock()  # vLLM-Omni chooses replicas of sessions in other threads, too
        self.queues: dict[int, StageQueue] = {}
        self.recovery: RecoveryDriver | None = None  # set by the orchestrator
        self.proceeds: Callable[[e.Proceeds], None] = lambda _: None  # of stages that branch; set by the orchestrator
        self.board = StageBoard(
            [stage.stage_id for stage in graph.stages],
            anomalies=[kind.value for kind in AnomalyKind],
            incidents=[kind.value for kinds in (IncidentKind, RemedyStep) for kind in kinds],
            reasons=[reason.value for reason in FailReason],
        )
        forecast = config.monitoring.forecast
        self.forecaster = Forecaster(forecast, self.board, wall) if forecast.enabled else None
        monitor = StageMonitor if config.monitoring.enabled else NullMonitor
        self.monitor = monitor(config.monitoring.anomaly, graph, self.board, self._found, self._payloads_sent)
        names = {stage.stage_id: stage.name for stage in graph.stages}
        journal = config.monitoring.journal
        self.journal = FaultJournal(journal, names, wall) if journal.path is not None else None
        self.merges = config.graph.merging.enabled

    def handle(self, event: e.Event, now: float) -> list[e.Action]:
        """Pass an event to the core, and return its actions."""
        with self._lock:
            return self.core.handle(event, now)

    @property
    def known(self) -> Mapping[str, PipelineRequest]:
        """Return the requests in the pipeline."""
        return self.context.known

    @property
    def has_waiting(self) -> bool:
        """Return whether there is work that waits, or that has started and is not sent."""
        return any(queue.has_waiting for queue in self.queues.values())

    async def release(self, now: float) -> None:
        """Start all works of all stages that can start now."""
        for action in self.handle(e.Tick(), now):
            self.do(action, now)
        for stage_id in sorted(self.queues, reverse=True):
            await self.queues[stage_id].send()

    def do(self, action: e.Action, now: float, queue: StageQueue | None = None) -> None:
        """Carry out an action, except for sending. ``queue``: that of the stage whose event led to it."""
        match action:
            case e.Start(work):
                self.queues[work.stage_id].do(action, now)
            case e.Report(incident):
                self.incident(incident)
            case e.AnomalyBegins(stage_id, anomaly):
                self.monitor.tell(stage_id, anomaly)
                self.anomaly(stage_id, anomaly, now)
            case e.Remedy(decision):
                self._remedy(decision)
            case e.Proceeds():
                self.proceeds(action)
            case e.RunsAgain() | e.GivenUp() | e.Unserved() | e.Restart() | e.Forgotten():
                if self.journal is not None and isinstance(action, e.RunsAgain):
                    first = action.works[0]
                    self.journal.redispatched(first.stage_id, first.replica_id, action.receivers)
                if self.recovery is not None:
                    self.recovery.do(action)
            case _:
                if queue is not None:
                    queue.do(action, now)

    def measure_memory(self, now: float) -> None:
        """Tell the core how much of the host's memory is in use, if that has changed and limits anything."""
        if self.memory is None:
            return
        used = self.memory.used(now)
        if used != self.context.memory_used:
            self.handle(e.MemoryMeasured(used), now)

    def arrived(self, message: Any, now: float) -> None:
        """Record that a request has arrived at the pipeline."""
        params = message.sampling_params_list
        modality = modality_of(message.prompt)
        sla = self.classes.of(params[0], modality)
        flow = None
        stages = self.graph.stages[: message.final_stage_id + 1]
        if self.graph.branches:
            plan = FlowPlan.of(self.graph, message.final_output_stage_ids or [message.final_stage_id])
            stages, flow = tuple(map(self.graph.stage, plan.stages)), RequestFlow(plan)
        known = PipelineRequest(
            message.request_id,
            now,
            sla,
            self.classes.is_low(sla),
            getattr(message.prompt, "priority", 0) or 0,
            modality,
            keys_of(message.prompt, params[0]),
            tuple(stage.stage_id for stage in stages),
            flow=flow,
        )
        for stage in stages:
            prompt = message.prompt if stage.stage_id in self.graph.entries else None
            known.features[stage.stage_id] = features_of(prompt, params[stage.stage_id])
        self.handle(e.Arrived(known), now)
        if self.forecaster is not None:
            self.forecaster.arrived(modality)

    def left(self, request_id: str, now: float) -> None:
        """Forget a request that has left the pipeline, and free what it held."""
        known = self.known.get(request_id)
        if self.forecaster is not None and known is not None:
            self.forecaster.shares.left(known.modality, known.replicas)
        for action in self.handle(e.Left(request_id), now):
            self.do(action, now)

    def describe(
        self, pool: ScheduledPool, request_id: str, state: Any, request: Any, submit_args: dict[str, Any], now: float
    ) -> Work:
        """Describe a submission to a stage as a `Work`."""
        stage_id = pool.stage_id
        known = self.known.get(request_id)
        if known is None:  # it did not arrive in the normal way
            known = PipelineRequest(request_id, now, self.classes.default)
            self.handle(e.Arrived(known), now)
        known.features[stage_id] = features_of(request, state.sampling_params_list[stage_id])
        if known.priority and getattr(request, "priority", None) == 0:
            request.priority = known.priority  # vLLM-Omni passes it to the first stage only
        return Work(
            request_id=request_id,
            stage_id=stage_id,
            state=state,
            request=request,
            submit_args=submit_args,
            known=known,
            arrived=now,
        )

    def check(self, now: float) -> None:
        """Let the core look for anomalies, and carry out what follows."""
        for action in self.handle(e.Check(), now):
            self.do(action, now)

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
        if incident.kind is IncidentKind.BACK:
            self.board.restarted(incident.replica.stage, incident.replica.index)
        if self.journal is not None:
            self.journal.incident(incident)

    def anomaly(self, stage_id: int, anomaly: Anomaly, now: float) -> None:
        """Keep an anomaly that was logged and counted."""
        if self.journal is not None:
            self.journal.anomaly(stage_id, anomaly, now)

    def _payloads_sent(self, moved: Moved, now: float) -> None:
        """Tell the core the size of payloads."""
        self.handle(e.PayloadsMeasured(moved.from_stage, moved.to_stage, moved.messages, moved.nbytes), now)

    def _found(self, stage_id: int, replica: Replica, anomaly: Anomaly, now: float) -> None:
        """Keep an anomaly that only the driver can see, and tell the core."""
        self.anomaly(stage_id, anomaly, now)
        for action in self.handle(e.AnomalyFound(replica.stage, replica.index, anomaly.kind), now):
            self.do(action, now)

    def _remedy(self, decision: RemedyAction) -> None:
        """Log, count and keep what follows from an anomaly, and do it."""
        replica = decision.replica
        step, cause = decision.step.value, decision.cause
        logger.warning("stage %d replica %d: %s (%s)", replica.stage, replica.index, step, cause)
        self.board.incident(replica.stage, replica.index, step)
        if self.journal is not None:
            self.journal.remedy(decision)
        if self.recovery is not None:
            self.recovery.remedy(decision)

    def failed(self, stage_id: int, request_id: str, reason: FailReason, why: str) -> None:
        """Count and keep a request that was given up."""
        self.board.given_up(stage_id, reason.value)
        if self.journal is not None:
            self.journal.failed(stage_id, request_id, reason.value, why)

    def prepare(self, rates: Mapping[int, float], tested: bool, migrator: ReplicaMigrator, now: float) -> None:
        """Move replicas for the forecast requests per second by stage, or report missing ones.

        Replicas move only if the options allow it, the forecast was ``tested``, and no move is in progress.
        """
        assert self.forecaster is not None
        may_move = self.config.monitoring.forecast.move_replicas and tested and not migrator.busy
        states = {}
        for stage_id in self.core.stages:
            state = self._pool_state(stage_id, rates.get(stage_id, 0.0))
            if state is not None:
                states[str(stage_id)] = self._with_replicas(state, stage_id, migrator) if may_move else state
        plans, wanted = self.forecaster.plan(states, len(migrator.devices.spare) if may_move else 0, now)
        for name, plan in plans.items():
            if plan.reason is MoveReason.SHORT:
                logger.warning(
                    "stage %s: the forecast of %.3g requests per second needs more than its %d replicas",
                    self.graph.stage(int(name)),
                    rates[int(name)],
                    plan.replicas,
                )
        if may_move:  # one; the next ones are planned once it is done
            any(self._begin_move(move, migrator) for move in wanted)

    def _pool_state(self, stage_id: int, requests_per_second: float) -> PoolState | None:
        """Return the stage's state for the planner of replicas; None before anything has run here."""
        stage = self.core.stages[stage_id]
        if not stage.request_seconds or not stage.num_up:
            return None
        return PoolState(stage.num_up, capacity=1 / stage.request_seconds, forecast=requests_per_second)

    def _with_replicas(self, state: PoolState, stage_id: int, migrator: ReplicaMigrator) -> PoolState:
        """Return the state with the actual number of replicas, even those that have not run anything."""
        most = self.config.monitoring.forecast.max_replicas
        return replace(state, replicas=migrator.count(stage_id), maximum=most)

    def _begin_move(self, move: Move, migrator: ReplicaMigrator) -> bool:
        """Begin a move, and return whether it could begin."""
        source = None if move.source is None else migrator.idlest(int(move.source))
        if move.source is None:
            assert move.target is not None
            begun = migrator.take_spare(int(move.target))
        elif source is None:
            return False
        elif move.target is None:
            begun = migrator.give_up(source)
        else:
            begun = migrator.hand_over(source, int(move.target))
        names = move.source or "none", move.target or "none"
        logger.info(
            "forecast: moving a replica from stage %s to stage %s: %s",
            *names,
            begun.value if isinstance(begun, MigrationOutcome) else "move begins",
        )
        return not isinstance(begun, MigrationOutcome)

    def layout(self, migrator: ReplicaMigrator) -> StageLayout | None:
        """Return the layout that places stages on devices, None if that is off."""
        options = self.config.graph.partition
        names = {stage.stage_id: stage.name for stage in self.graph.stages}
        return StageLayout(options, migrator, self.board, self._seconds, names) if options.enabled else None

    def _seconds(self, stage_id: int) -> float | None:
        stage = self.core.stages.get(stage_id)
        return None if stage is None else stage.request_seconds

    def close(self) -> None:
        """Write what is kept beyond this process."""
        if self.journal is not None:
            self.journal.close()

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

"""Monitor the stages: detect anomalies, and measure the memory of replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_omni_sched.config.stage_options import AnomalyOptions
from vllm_omni_sched.graph.stages import StageGraph
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.monitor.anomaly import Anomaly, MemoryLeak, SickEdge
from vllm_omni_sched.monitor.anomaly.news import News
from vllm_omni_sched.monitor.recovery.events import Replica
from vllm_omni_sched.monitor.stage_board import Side, StageBoard
from vllm_omni_sched.omni.stages.reports.processes import host_bytes, pids_of, running_under
from vllm_omni_sched.omni.stages.reports.report_reader import Moved, ReportReader

if TYPE_CHECKING:
    from vllm_omni_sched.omni.stages.pool import ScheduledPool

logger = get_logger(__name__)

MEMORY_SECONDS = 5.0  # between two checks of the stages' processes and reports


class StageMonitor:
    """Feeds the detectors of leaks and of sick edges, and logs and counts all anomalies.

    The core detects the other kinds (`PipelineWatch`); here is what needs the processes and reports of the stages.

    Args:
        options: options of the detectors.
        graph: the graph of stages.
        board: receives the findings.
        found: gets each anomaly that is detected here when it begins: its stage, the replica that it was measured at,
            the anomaly and the time.
        sent: gets the messages that a replica has sent since its last report, and the time.
    """

    def __init__(
        self,
        options: AnomalyOptions,
        graph: StageGraph,
        board: StageBoard,
        found: Callable[[int, Replica, Anomaly, float], None],
        sent: Callable[[Moved, float], None] = lambda _, __: None,
    ) -> None:
        self._options, self._board, self._found, self._sent = options, board, found, sent
        self._ids = {str(stage): stage.stage_id for stage in graph.stages}
        self._names = {stage_id: name for name, stage_id in self._ids.items()}
        self._leak = MemoryLeak()
        self._edge = SickEdge()
        self._next = self._next_memory = 0.0
        self._reports = ReportReader(board)
        self._started: dict[tuple[int, int], list[int]] = {}  # processes of each replica
        self._ends: dict[str, tuple[tuple[int, int], int]] = {}  # by edge: replica that reports, stage at the other end
        self._news = News()

    def sent(self, from_stage: int, to_stage: int, seconds: float) -> None:
        """Record that the front end has handed a request over; the stages report the transfer of its payload."""
        self._board.edge(from_stage, to_stage, seconds)

    def check(self, pools: list[ScheduledPool], now: float) -> None:
        """Measure memory and read reports, once per interval; an anomaly is told when it begins."""
        if now < self._next:
            return
        self._next = now + self._options.interval_seconds
        if now >= self._next_memory:
            self._next_memory = now + MEMORY_SECONDS
            self._memory(pools, now)
        if self._options.enabled:
            for one in self._news.begun((*self._leak.check(now), *self._edge.check(now))):
                stage_id = self._stage_of(one.subject)
                self.tell(stage_id, one)
                self._found(stage_id, self._replica_of(one.subject), one, now)

    def tell(self, stage_id: int, anomaly: Anomaly) -> None:
        """Log and count an anomaly that begins."""
        evidence = ", ".join(f"{name} {value:.4g}" for name, value in anomaly.evidence.items())
        logger.warning("%s: %s%s (%s)", anomaly.subject, anomaly.kind.value, _of(anomaly.request_id), evidence)
        self._board.anomaly(stage_id, anomaly.kind.value)

    def _stage_of(self, subject: str) -> int:
        """Return the stage of a subject: by its name, that of a replica, or the one where an edge ends."""
        if subject in self._ids:
            return self._ids[subject]
        _, arrow, to = subject.partition("->")
        return int(to.partition(" ")[0]) if arrow else self._ids[subject.partition(" replica ")[0]]

    def _replica_of(self, subject: str) -> Replica:
        """Return the replica of a subject: the one that holds the memory, or whose transfers are sick."""
        if subject in self._ends:
            return Replica(*self._ends[subject][0])
        name, _, replica_id = subject.rpartition(" replica ")
        return Replica(self._ids[name], int(replica_id))

    def _memory(self, pools: list[ScheduledPool], now: float) -> None:
        import psutil

        capacity = psutil.virtual_memory().total
        replicas: dict[tuple[int, int], list[int]] = {}
        for pool in pools:
            for replica_id in pool.live_replica_ids():
                key = pool.stage_id, replica_id
                started = pids_of(pool.clients[replica_id])
                processes = running_under(started)
                if not processes:
                    continue  # they are on another host
                held = host_bytes(processes)
                subject = f"{self._names[pool.stage_id]} replica {replica_id}"
                if self._started.get(key, started) != started:
                    self._gone(key)  # it was restarted
                self._started[key] = started
                replicas[key] = [process.pid for process in processes]
                in_flight = sum(work.replica_id == replica_id for work in pool.queue.running.values())
                self._board.memory(*key, None, held)
                self._leak.observe(subject, now, held, capacity, in_flight)
        for key in self._started.keys() - replicas.keys():
            self._gone(key)
        for moved in self._reports.read(replicas):
            self._moved(moved, now)

    def _moved(self, moved: Moved, now: float) -> None:
        """Record transfers of one replica: a slow one would be lost in the mean of all."""
        replica, side, messages = moved.replica, moved.side, moved.messages
        if side == Side.PUT.value and messages:
            self._sent(moved, now)
        edge = f"{moved.from_stage}->{moved.to_stage} {side} by replica {replica[1]}"
        self._ends[edge] = replica, moved.to_stage if side == Side.PUT.value else moved.from_stage
        each = max(messages, 1)
        self._edge.observe_many(
            edge, now, moved.seconds / each, moved.nbytes // each, well=messages, failed=moved.failed
        )

    def _gone(self, key: tuple[int, int]) -> None:
        """Forget a replica that is gone or was replaced, and the edges that end there."""
        stage_id, replica_id = key
        del self._started[key]
        self._leak.forget(f"{self._names[stage_id]} replica {replica_id}")
        for edge, (replica, other_stage) in list(self._ends.items()):
            if replica == key or other_stage == stage_id:
                self._edge.forget(edge)
                del self._ends[edge]


class NullMonitor(StageMonitor):
    """Replaces `StageMonitor` where `monitoring.enabled` is false: it checks and keeps nothing."""

    def sent(self, from_stage: int, to_stage: int, seconds: float) -> None:
        pass

    def check(self, pools: list[ScheduledPool], now: float) -> None:
        pass


def _of(request_id: str) -> str:
    return f" of request {request_id}" if request_id else ""

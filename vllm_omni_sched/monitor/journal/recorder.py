"""Turn what the pipeline core decides into entries of the journal of faults."""

from collections.abc import Callable, Mapping

from vllm_omni_sched.clock import Clock
from vllm_omni_sched.monitor.anomaly.finding import Anomaly
from vllm_omni_sched.monitor.journal.fault import Fault, FaultKind
from vllm_omni_sched.monitor.recovery.events import Incident, IncidentKind, Replica
from vllm_omni_sched.monitor.recovery.remedies import RemedyAction

Write = Callable[[Fault], None]

OUTAGES = frozenset({IncidentKind.SUSPECTED, IncidentKind.DIED, IncidentKind.DRAINING})
"""Incidents with which an outage of a replica begins, unless it is in one."""
OVER = frozenset({IncidentKind.CLEARED, IncidentKind.BACK, IncidentKind.MOVED_IN, IncidentKind.STAYED})
"""Incidents with which it ends."""


class FaultRecorder:
    """Makes entries of incidents, anomalies and what happens to requests.

    1. Times of entries are those of the wall clock. Durations are differences of the monotonic times of the events.
    2. An outage of a replica begins when it is suspected, drained or dead, and ends when it serves again, answers
       again, or stays. Entries after its beginning have the seconds since then.
    3. The entry of the end has the number of requests that the outage has interrupted.
    4. An anomaly is an entry when it begins, with the seconds for which it has been seen, and its evidence.

    Nothing is kept but the outages of replicas, which are few.

    Args:
        names: of the stages, by id.
        write: gets the entries.
        wall: the wall clock.
    """

    def __init__(self, names: Mapping[int, str], write: Write, wall: Clock) -> None:
        self._names, self._write, self._wall = names, write, wall
        self._outages: dict[Replica, tuple[float, int]] = {}  # since when, and requests affected

    def pipeline(self, kind: FaultKind, cause: str) -> None:
        """Record that the pipeline starts or stops."""
        self._write(Fault(self._wall(), kind.value, cause=cause))

    def incident(self, incident: Incident) -> None:
        """Record an incident of a replica."""
        replica, kind, requests = incident.replica, incident.kind, incident.requests
        seconds = None
        if replica in self._outages:
            since, affected = self._outages[replica]
            seconds = max(incident.at - since, 0.0)
            self._outages[replica] = since, max(affected, requests)
            if kind in OVER:
                del self._outages[replica]
                requests = max(requests, affected)
        elif kind in OUTAGES:
            self._outages[replica] = incident.at, requests
        self._replica(kind.value, replica, requests=requests, seconds=seconds, cause=incident.cause)

    def killed(self, stage_id: int, replica_id: int, seconds: float) -> None:
        """Record that the processes of a replica were killed, which had hung for so long."""
        self._replica(FaultKind.KILLED.value, Replica(stage_id, replica_id), seconds=seconds, cause="it hung")

    def remedy(self, decision: RemedyAction) -> None:
        """Record what follows from an anomaly."""
        self._replica(decision.step.value, decision.replica, cause=decision.cause)

    def anomaly(self, stage_id: int, anomaly: Anomaly, now: float) -> None:
        """Record an anomaly that begins."""
        self._write(
            Fault(
                self._wall(),
                anomaly.kind.value,
                stage=stage_id,
                name=self._names.get(stage_id, ""),
                replica=int(anomaly.evidence.get("replica", -1)),
                requests=1 if anomaly.request_id else 0,
                request_id=anomaly.request_id,
                seconds=max(now - anomaly.since, 0.0),
                cause=anomaly.subject,
                evidence={name: float(value) for name, value in anomaly.evidence.items()},
            )
        )

    def redispatched(self, stage_id: int, replica_id: int, request_ids: tuple[str, ...]) -> None:
        """Record that interrupted work runs again on a replica, for these requests, the leader first."""
        self._replica(
            FaultKind.REDISPATCHED.value,
            Replica(stage_id, replica_id),
            requests=len(request_ids),
            request_id=request_ids[0],
        )

    def failed(self, stage_id: int, request_id: str, reason: str, why: str) -> None:
        """Record that a request was answered with an error."""
        self._write(
            Fault(
                self._wall(),
                FaultKind.FAILED.value,
                stage=stage_id,
                name=self._names.get(stage_id, ""),
                requests=1,
                request_id=request_id,
                cause=why if reason in why else f"{why} ({reason})",
            )
        )

    def _replica(
        self,
        kind: str,
        replica: Replica,
        requests: int = 0,
        request_id: str = "",
        seconds: float | None = None,
        cause: str = "",
    ) -> None:
        name = self._names.get(replica.stage, "")
        self._write(Fault(self._wall(), kind, replica.stage, name, replica.index, requests, request_id, seconds, cause))

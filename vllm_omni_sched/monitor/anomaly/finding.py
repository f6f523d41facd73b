"""What a detector says."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class AnomalyKind(str, Enum):
    """What is wrong; the label of the metric, too."""

    STAGE_TIMEOUT = "stage_timeout"  # a request is in a stage for longer than that stage ever takes
    MEMORY_LEAK = "memory_leak"  # memory grows, and not with the load
    STUCK_QUEUE = "stuck_queue"  # there is work, and nothing finishes
    SILENT_REPLICA = "silent_replica"  # it has work, says nothing and does nothing
    SICK_EDGE_ERRORS = "sick_edge_errors"  # transfers fail more often than they did
    SICK_EDGE_LATENCY = "sick_edge_latency"  # transfers take longer than they did, and than those of the other edges


@dataclass(frozen=True)
class Anomaly:
    """Something is wrong now.

    ``subject``: the stage, replica or edge. ``request_id``: the request, where it is about one.
    ``since``: when it began, as far as the detector can tell.
    ``severity``: how many times the bound was passed, 1 or more.
    ``evidence``: the numbers behind it, by name.
    """

    kind: AnomalyKind
    subject: str
    since: float
    severity: float
    evidence: Mapping[str, float]
    request_id: str = ""

"""Types of a detector's findings."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class AnomalyKind(str, Enum):
    """Kind of anomaly; also the label of the metric."""

    STAGE_TIMEOUT = "stage_timeout"  # a request is in a stage for longer than usual
    MEMORY_LEAK = "memory_leak"  # memory grows independently of the load
    STUCK_QUEUE = "stuck_queue"  # there is work, and nothing finishes
    SILENT_REPLICA = "silent_replica"  # a replica with work sends nothing and computes nothing
    SICK_EDGE_ERRORS = "sick_edge_errors"  # transfers fail more often than before
    SICK_EDGE_LATENCY = "sick_edge_latency"  # transfers take longer than before, and than those of other edges


@dataclass(frozen=True)
class Anomaly:
    """An anomaly that is present now.

    ``subject``: the stage, replica or edge. ``request_id``: the request, if it concerns a single one.
    ``since``: when it began, as far as the detector can tell.
    ``evidence``: the numbers behind the finding, by name.
    """

    kind: AnomalyKind
    subject: str
    since: float
    evidence: Mapping[str, float]
    request_id: str = ""

"""Expected waiting times of messages, learnt from others of their edge."""

from __future__ import annotations

from vllm_omni_sched.connectors.edge import Edge
from vllm_omni_sched.resource.rate import Rate


class Waits:
    """Learns how long messages of each edge wait, in seconds.

    Args:
        start: expected wait before any was observed.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._edges: dict[Edge, Rate] = {}

    def observe(self, edge: Edge, seconds: float) -> None:
        """Record the wait of a received message."""
        self._edges.setdefault(edge, Rate(self._start)).observe(1, seconds)

    def expected(self, edge: Edge) -> float:
        """Return the expected wait of a message that is put now."""
        rate = self._edges.get(edge)
        return self._start if rate is None else rate.per_unit


def next_use_seconds(expected: float, waited: float) -> float:
    """Return how long a message is expected to wait still; an overdue one, as long again as it is overdue."""
    return abs(expected - waited)

"""When messages are expected to be wanted, learnt from how long others of their edge have waited."""

from __future__ import annotations

from vllm_omni_sched.connectors.base import Edge
from vllm_omni_sched.resource.rate import Rate


class Waits:
    """How long messages of each edge wait, in seconds.

    Args:
        start: until some were seen.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._edges: dict[Edge, Rate] = {}

    def observe(self, edge: Edge, seconds: float) -> None:
        """A message was got after so long."""
        self._edges.setdefault(edge, Rate(self._start)).observe(1, seconds)

    def expected(self, edge: Edge) -> float:
        """Of a message that is put now."""
        rate = self._edges.get(edge)
        return self._start if rate is None else rate.per_unit


def next_use_seconds(expected: float, waited: float) -> float:
    """How long a message that has waited will wait still. What is overdue will, for all we know, as long as it is."""
    return abs(expected - waited)

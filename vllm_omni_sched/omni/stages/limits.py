"""How many requests each replica of a stage is given at once, and how much work it has left."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_omni_sched.resource.pid import PidBatch


@dataclass
class ReplicaLoad:
    """What a replica has in hand.

    Requests that run together slow each other down; what one costs is therefore its share of the time: the seconds
    that passed divided by how many ran (processor sharing).
    """

    limit: PidBatch
    served: float = 0.0  # seconds that each request in it has had
    since: float = 0.0
    began: dict[str, float] = field(default_factory=dict)  # request -> `served` when it came
    costs: dict[str, float] = field(default_factory=dict)

    def begin(self, request_id: str, cost_seconds: float, now: float) -> None:
        self._pass(now)
        self.began[request_id], self.costs[request_id] = self.served, cost_seconds

    def end(self, request_id: str, now: float) -> float | None:
        """The seconds that it had; None for one that is not there."""
        self._pass(now)
        self.costs.pop(request_id, None)
        began = self.began.pop(request_id, None)
        return None if began is None else self.served - began

    def remaining_seconds(self, now: float) -> float:
        """Of all that are there, as far as costs are known; one that took longer than it should is nearly done."""
        self._pass(now)
        had = ((self.served - self.began[name], cost) for name, cost in self.costs.items())
        return sum(max(cost - seconds, 0.1 * cost) for seconds, cost in had)

    def _pass(self, now: float) -> None:
        if self.began and now > self.since:
            self.served += (now - self.since) / len(self.began)
        self.since = now

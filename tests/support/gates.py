"""Define a gate of a stage that the test opens and closes."""

from __future__ import annotations

import random

from vllm_omni_sched.graph.order import BATCH, WaitingRequest
from vllm_omni_sched.resource.pipeline.stage_gate import GateRequest, GateTerms, StageGate


def some(names, place=0, cost=1.0, **more):
    """Requests that go in the order of ``names`` (by when they arrived), behind those of a lower ``place``."""
    return [
        GateRequest(WaitingRequest(name, float(i), BATCH, cost_seconds=cost, priority=place), **more)
        for i, name in enumerate(names)
    ]


def told(made):
    return [(one.request_id, one.replica_id, one.reason.value) for one in made.releases]


class Asked(GateTerms):
    """Holds a gate, and the answers that it gets.

    ``none_for``: needs without credits; ``refused``: whose credits cannot be taken; ``asked``: whose were to be.
    """

    def __init__(self, gate=None, waiting=()):
        self.gate = StageGate() if gate is None else gate
        self.none_for, self.refused, self.asked = set(), set(), []
        self.near, self.far, self.saved = {}, {}, {}
        self.names = []
        self.comes(*waiting)

    def comes(self, *requests, now=0.0):
        for one in requests:
            self.gate.put(one, now)
            self.names.append(one.request_id)

    def plan(self, *replicas, now=0.0):
        return self.gate.release(now, replicas, random.Random(0), self)

    def held(self):
        return [name for name in dict.fromkeys(self.names) if name in self.gate]

    def has_credits(self, needs):
        return needs not in self.none_for

    def take(self, request_id):
        self.asked.append(request_id)
        return request_id not in self.refused

    def warm(self, request_id):
        return self.near.get(request_id, {})

    def saved_seconds(self, request_id):
        return self.saved.get(request_id)

    def distances(self, request_id):
        return self.far.get(request_id, {})

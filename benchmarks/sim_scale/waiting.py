"""What one decision costs with 10,000 that wait: in the SLA queue of an engine, and before the gate of a stage."""

from __future__ import annotations

import random
import time
from typing import Any

from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, REALTIME, WaitingOrder, WaitingRequest
from vllm_omni_sched.graph.waiting_queue import WaitingQueue
from vllm_omni_sched.resource.balance import CostBalancer, ReplicaState
from vllm_omni_sched.resource.stage_gate import GateRequest, StageGate
from vllm_omni_sched.sim.pools.gate import ask

_CLASSES = (REALTIME, INTERACTIVE, INTERACTIVE, BATCH)


def queue(waiting: int, decisions: int, seed: int = 0) -> dict[str, Any]:
    """µs of a pop with so many waiting, and of the push that fills up again; some share an image."""
    dice = random.Random(seed)
    held = WaitingQueue(WaitingOrder())
    now = 0.0

    def another(number: int) -> WaitingRequest:
        images = frozenset({str(dice.randrange(waiting))}) if dice.random() < 0.5 else frozenset()
        sla = dice.choice(_CLASSES)
        return WaitingRequest(str(number), now, sla, dice.uniform(0.01, 0.5), "image", images)

    for number in range(waiting):
        held.push(another(number), now)
    pops, pushes = 0, 0
    for number in range(decisions):
        now += 1e-3
        request = another(waiting + number)
        begun = time.perf_counter_ns()
        held.pop(now)
        between = time.perf_counter_ns()
        held.push(request, now)
        pops += between - begun
        pushes += time.perf_counter_ns() - between
    return {
        "waiting": waiting,
        "pop_us": round(pops / decisions / 1e3, 2),
        "push_us": round(pushes / decisions / 1e3, 2),
    }


def gate(waiting: int, decisions: int, seed: int = 0) -> dict[str, Any]:
    """µs of one look of the gate at so many that wait and 8 replicas of which one has a place."""
    dice = random.Random(seed)
    one = StageGate(CostBalancer())
    held = [GateRequest(str(number), dice.uniform(0.01, 0.5)) for number in range(waiting)]
    taken = 0
    for number in range(decisions):
        replicas = [ReplicaState(at, 1.0 + at, 31 if at == number % 8 else 32) for at in range(8)]
        begun = time.perf_counter_ns()
        ask(one, number * 1e-3, held, replicas, dice)
        taken += time.perf_counter_ns() - begun
    return {"waiting": waiting, "decision_us": round(taken / decisions / 1e3, 2)}

"""The loads of `balance` on two simulated replicas, which wait for no processor: what the choice of a replica is worth.

The policies and the core are the real ones. The work of a request is `STEP_SECONDS` for each of its steps, which the
simulator computes as tokens of its prompt: their number is known when it comes, as that of the real benchmark is by
``max_tokens``, and the policies learn what one takes.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.stages.load import Request
from benchmarks.stages.record import Bar, entry
from vllm_omni_sched.graph.order import BATCH, Undated, WaitingOrder, WaitingRequest
from vllm_omni_sched.resource.pipeline.replica_state import ReplicaState
from vllm_omni_sched.resource.pipeline.stage_gate import GateRequest, StageGate
from vllm_omni_sched.sim.costs.measured import write_calibration
from vllm_omni_sched.sim.run import simulate
from vllm_omni_sched.sim.scenario.loader import build
from vllm_omni_sched.sim.workloads.trace import Exact, Header, write_trace

STEP_SECONDS = 0.004  # of a decode step of the tiny talker
LATER = 600.0  # when the requests that are measured come
CLASS = "batch"
COSTS: dict[str, Any] = {
    "step": {
        "base_seconds": 0.0,
        "per_decode": 0.0,
        "per_context_token": 0.0,
        "per_prefill_token": STEP_SECONDS,
        "per_prefill_pair": 0.0,
    },
    "encode": {},
    "frontend": {"per_request": 0.0, "per_text_token": 0.0},
    "answer_seconds": 0.0,
}

REPLICAS = (2, 4)
EACH = 12  # requests for each replica

STOCK, LEAST_QUEUE = "round robin", "least queue"
KNOWN_ARRIVAL, KNOWN_LONGEST = "known costs, by arrival", "known costs, longest first"
KNOWN_BALANCED = "known costs, balanced"
"""Names of list scheduling, in which each request takes the replica that is free first and all costs are known."""
POLICIES: dict[str, dict[str, Any]] = {
    STOCK: {"balance": "round_robin"},  # vLLM-Omni on one host
    LEAST_QUEUE: {"balance": "least_queue"},  # its best choice, which it has with a coordinator of several hosts
    "arrival": {},
    "balanced": {},
    "longest": {},
}
"""Options of the stage; the last three are ours, by order."""

TITLES = {"arrival": "arrival first", "balanced": "balanced", "longest": "longest first"}
"""Names of the orders in results."""


def makespan(
    before: Sequence[Request], requests: Sequence[Request], policy: str, replicas: int, seqs: int, folder: Path
) -> float:
    """Return the seconds from the arrival of all requests until the last of them is done.

    The requests ``before`` have left by then; the policies have learnt from them.
    """
    calibration, trace = folder / "talker.json", folder / "trace.jsonl"
    write_calibration(calibration, {"model": "assumed"}, COSTS, 1 << 20)
    entries = [
        Exact(at=at, text_tokens=one.says, output_tokens=1, sla=CLASS, client=number)  # no two of one client
        for number, (at, one) in enumerate([*((0.0, one) for one in before), *((LATER, one) for one in requests)])
    ]
    write_trace(trace, Header(format="vllm-omni-sched trace", version=1, source="benchmarks.stages"), entries)
    stage = {
        "kind": "engine",
        "name": "talker",
        "calibration": str(calibration),
        "replicas": replicas,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": 2048,  # so that each is one step
        **POLICIES[policy],
    }
    raw: dict[str, Any] = {
        "name": "balance",
        "seed": 0,
        "duration_seconds": 3600.0,
        "workload": {"kind": "trace", "file": str(trace)},
        "stages": [stage],
    }
    if policy not in (STOCK, LEAST_QUEUE):
        raw["orchestration"] = {"graph": {"priority": {"without_deadline": policy}}}
    result = simulate(build(raw, "balance", folder))
    if len(result.records) != len(entries):
        raise RuntimeError(f"{len(entries)} requests were sent, and {len(result.records)} left the simulated stage")
    return max(record.end for record in result.records) - LATER


def makespans(before: Sequence[Request], requests: Sequence[Request], replicas: int, seqs: int) -> dict[str, float]:
    """Return the makespan with each of `POLICIES`, and of each order if all costs were known."""
    steps = [one.says for one in requests]
    with tempfile.TemporaryDirectory(prefix="balance-") as folder:
        found = {policy: makespan(before, requests, policy, replicas, seqs, Path(folder)) for policy in POLICIES}
    found[KNOWN_ARRIVAL] = STEP_SECONDS * first_free(steps, replicas)
    found[KNOWN_BALANCED] = STEP_SECONDS * balanced(steps, replicas)
    found[KNOWN_LONGEST] = STEP_SECONDS * first_free(sorted(steps, reverse=True), replicas)
    return found


def first_free(costs: Sequence[float], replicas: int) -> float:
    """Return the makespan if each request goes, in order, to the replica that is free first."""
    loads = [0.0] * replicas
    for cost in costs:
        loads[loads.index(min(loads))] += cost
    return max(loads)


def balanced(costs: Sequence[float], replicas: int) -> float:
    """Return the makespan if the gate of a stage starts the requests in the order ``balanced``."""
    gate, rng = StageGate(max_hold_seconds=0.0, order=WaitingOrder(math.inf, Undated.BALANCED)), Random(0)
    for number, cost in enumerate(costs):
        gate.put(GateRequest(WaitingRequest(str(number), number, BATCH, cost)), 0.0)
    ends = [0.0] * replicas
    while gate:
        now = min(ends)
        states = [ReplicaState(one, end - now, int(end > now), limit=1) for one, end in enumerate(ends)]
        for release in gate.release(now, states, rng).releases:
            ends[release.replica_id] = now + costs[int(release.request_id)]
    return max(ends)


def record(load: str, rounds: Sequence[dict[str, float]], replicas: int = 2) -> list[dict[str, Any]]:
    """Return ours beside each baseline, for each order; marked as simulated."""
    found = []
    for order, known in (("arrival", KNOWN_ARRIVAL), ("balanced", KNOWN_BALANCED), ("longest", KNOWN_LONGEST)):
        ours = [one[order] for one in rounds]
        for baseline, bar in ((STOCK, Bar(0.85)), (LEAST_QUEUE, None), (known, Bar(1.05))):
            label = f"simulated: {load}, {TITLES[order]}, {replicas} replicas: makespan beside {baseline}"
            theirs = [one[baseline] for one in rounds]
            one = entry("balance", label, ours, theirs, bar=bar)
            found.append(one | {"of_stock_in_total": round(sum(ours) / sum(theirs), 4), "simulated": True})
    return found


def run(
    draws: Mapping[str, Callable[[int, Random], list[Request]]], rounds: int, seqs: int, rng: Random
) -> list[dict[str, Any]]:
    """Simulate each load several times, with other requests each time, on each number of replicas."""
    found = []
    for replicas in REPLICAS:
        for load, draw in draws.items():
            turns = [[draw(EACH * replicas, rng) for _ in range(2)] for _ in range(rounds)]
            found += record(load, [makespans(*turn, replicas, seqs) for turn in turns], replicas)
    return found

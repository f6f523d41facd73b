"""Results of runs that nobody made: for what comes after a run."""

from __future__ import annotations

import os
import random
from typing import Any

from vllm_omni_sched.sim.measure import Histogram, Outcome, Progress, Record, Result, Sample
from vllm_omni_sched.sim.scenario.scenario import Scenario


def record(number: int = 0, **changes: Any) -> Record:
    """Return the record of a request that arrived in the second of its number and was served well."""
    values = {
        "arrival": float(number),
        "modality": "image",
        "sla": "interactive",
        "first": number + 1.0,
        "end": number + 2.0,
        "output_tokens": 11,
        "largest_gap": 0.1,
        "outcome": Outcome.DONE,
    }
    return Record(number=number, **{**values, **changes})


def synthetic(scenario: Scenario, capacity: float = 10.0) -> Result:
    """Latencies of an M/M/1 queue of that capacity (requests per second), drawn at random; worse with more load."""
    rate = scenario.workload.rate or 1.0
    rng = random.Random(scenario.seed)
    slack = max(capacity - rate, 0.02 * capacity)
    records, gaps = [], Histogram()
    for number in range(int(rate * scenario.duration_seconds)):
        arrival = number / rate
        first = arrival + rng.expovariate(slack)
        gap = 0.02 + rng.expovariate(slack * 5)
        modality = rng.choice(("image", "text"))
        records.append(
            Record(number, arrival, modality, "interactive", first, first + 20 * gap, 21, 2 * gap, Outcome.DONE)
        )
        gaps.add(gap, 20)
    seconds = scenario.duration_seconds
    timeline = [
        Sample(at * seconds / 60, {stage.name: stage.replicas for stage in scenario.stages}) for at in range(60)
    ]
    held = {stage.name: stage.replicas * seconds for stage in scenario.stages}
    return Result(
        name=scenario.name,
        seed=scenario.seed,
        slo=scenario.slo,
        classes=scenario.classes,
        records=records,
        gaps=gaps,
        seconds=seconds + 5,
        measured_seconds=seconds,
        events=100 * len(records),
        steps=20 * len(records),
        busy_seconds={name: {"llm": 0.6 * one, "encode": 0.2 * one} for name, one in held.items()},
        held_seconds=held,
        device_seconds={stage.name: stage.devices_each * held[stage.name] for stage in scenario.stages},
        counters={"full": 3},
        sources={"llm": "assumed: for a test"},
        timeline=timeline,
    )


def dies(scenario: Scenario, progress: Progress | None = None, spans: Any = None) -> Result:
    """Die as a run does that the kernel ends for want of memory."""
    os._exit(9)


def run(scenario: Scenario, progress: Progress | None = None, spans: Any = None) -> Result:
    """Stand in for `vllm_omni_sched.sim.run.simulate`, without a simulation."""
    result = synthetic(scenario)
    if progress is not None:
        progress(scenario.duration_seconds / 2, result.events // 2)
        progress(scenario.duration_seconds, result.events)
    if spans is not None:
        spans.span("llm", 0, "step", 1.0, 0.5, {"decodes": 3})
        spans.span("llm", 0, "request 4", 1.0, 0.5)
    return result

"""Twice the load that the pipeline can take, of two classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.stats import quantile
from benchmarks.stages import OURS, STOCK, VARIANTS
from benchmarks.stages.load import Request, classes, spread
from benchmarks.stages.pair import Turn
from benchmarks.stages.record import Bar, answered, different, entry, latencies
from benchmarks.stages.settings import Settings

TASK = "priority"
REQUESTS, HIGH, SEQS = 160, 32, 4
OVERLOAD = 2.0
"""It lasts several times as long as the longest request takes by itself: else that would be all that P99 shows."""
SCALE, MOST_STEPS = 0.3, 400

Round = tuple[list[Request], Turn]


def run(settings: Settings) -> list[dict[str, Any]]:
    """Measure both variants under load; the capacity is stock's throughput when all requests arrive at once."""
    rng = settings.rng(TASK)
    with settings.pair(SEQS, {"graph": {"priority": {"client_classes": ["realtime", "batch"]}}}) as pair:
        pair.turn(requests_of(rng), rng)
        capacity = pair.ask(STOCK, requests_of(rng))["seconds"]
        rounds = []
        for _ in range(settings.rounds):
            requests = spread(requests_of(rng), capacity / OVERLOAD, rng)
            rounds.append((requests, pair.turn(requests, rng)))
    return record(rounds)


def requests_of(rng: Any) -> list[Request]:
    return classes(REQUESTS, HIGH, rng, scale=SCALE, most=MOST_STEPS)


def record(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    found = []
    for label, sla in (("high", "realtime"), ("low", "batch")):
        marks = [[request.sla == sla for request in requests] for requests, _ in rounds]
        late = {
            name: [latencies(turn[name], mark) for (_, turn), mark in zip(rounds, marks, strict=True)]
            for name in VARIANTS
        }
        for measure, q in (("P50", 0.5), ("P99", 0.99), ("worst", 1.0)):
            values = {name: [quantile(each, q) for each in rows] for name, rows in late.items()}
            bar = Bar(0.5) if (label, measure) == ("high", "P99") else None
            found.append(entry(TASK, f"latency of the {label} class, {measure}", values[OURS], values[STOCK], bar=bar))
    missing = {name: [len(requests) - answered(turn[name]) for requests, turn in rounds] for name in VARIANTS}
    found.append(entry(TASK, "not answered", missing[OURS], missing[STOCK], unit="requests", bar=Bar(0, "worst")))
    spans = {name: [turn[name]["seconds"] for _, turn in rounds] for name in VARIANTS}
    found.append(entry(TASK, "makespan", spans[OURS], spans[STOCK]))
    arrivals = [max(request.at for request in requests) for requests, _ in rounds]
    found.append(entry(TASK, "time in which they come", arrivals))
    others = [different(turn[OURS], turn[STOCK]) for _, turn in rounds]
    found.append(entry(TASK, "answers other than stock's", others, unit="answers"))
    return found

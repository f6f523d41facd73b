"""Bursts in which most requests ask what another one asks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.stages import OURS, STOCK
from benchmarks.stages.load import Request, bursts
from benchmarks.stages.pair import Turn
from benchmarks.stages.record import Bar, different, entry, latencies, runs
from benchmarks.stages.settings import Settings

TASK = "merging"
REQUESTS, CONTENTS, SEQS = 32, 8, 8

Round = tuple[list[Request], Turn]


def run(settings: Settings) -> list[dict[str, Any]]:
    rng = settings.rng(TASK)
    with settings.pair(SEQS) as pair:
        pair.turn(bursts(REQUESTS, CONTENTS, rng), rng)
        rounds = []
        for _ in range(settings.rounds):
            requests = bursts(REQUESTS, CONTENTS, rng)
            rounds.append((requests, pair.turn(requests, rng)))
    return record(rounds)


def repeats(requests: Sequence[Request]) -> list[bool]:
    """Return, for each request, whether an earlier one asked the same."""
    asked: set[tuple[str, int, int]] = set()
    found = []
    for request in requests:
        content = (request.prompt, request.thinks, request.says)
        found.append(content in asked)
        asked.add(content)
    return found


def record(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    marks = [repeats(requests) for requests, _ in rounds]
    distinct = [mark.count(False) for mark in marks]
    ours, stock = ([turn[name] for _, turn in rounds] for name in (OURS, STOCK))
    found = []
    for stage in (0, 1):
        counts = {name: [runs(turn[name], stage) for _, turn in rounds] for name in (OURS, STOCK)}
        found.append(entry(TASK, f"executions of stage {stage}", counts[OURS], counts[STOCK], unit="executions"))
        beyond = [[n - one for n, one in zip(counts[name], distinct, strict=True)] for name in (OURS, STOCK)]
        bar = Bar(0, "worst") if stage == 0 else None
        found.append(entry(TASK, f"of them beyond distinct inputs, stage {stage}", *beyond, unit="executions", bar=bar))
    late = [[statistics.median(latencies(w, m)) for w, m in zip(ws, marks, strict=True)] for ws in (ours, stock)]
    found.append(entry(TASK, "latency of duplicates, median", *late, bar=Bar(0.6)))
    firsts = [[not one for one in mark] for mark in marks]
    first = [[statistics.median(latencies(w, m)) for w, m in zip(ws, firsts, strict=True)] for ws in (ours, stock)]
    found.append(entry(TASK, "latency of the others, median", *first))
    others = [different(turn[OURS], turn[STOCK]) for _, turn in rounds]
    found.append(entry(TASK, "answers other than stock's", others, unit="answers"))
    return found

"""Requests of widely different cost before two replicas that run one at a time each, in two orders."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from benchmarks.stages import OURS, STOCK, VARIANTS, balance_simulated
from benchmarks.stages.load import Request, heavy_clients, skewed
from benchmarks.stages.pair import Turn
from benchmarks.stages.record import Bar, different, entry
from benchmarks.stages.settings import Settings

TASK = "balance"
REQUESTS, REPLICAS = 24, 2
SEQS = 1
"""As where one request fills a device; on this CPU eight small ones take about as long as one."""
MOST_STEPS = 900
SIMULATED_ROUNDS = 50
LOADS: dict[str, Callable[[int, Random], list[Request]]] = {
    "images": partial(skewed, tokens_per_step=14.0, most=MOST_STEPS),
    "heavy clients": partial(heavy_clients, steps=11.0, most=MOST_STEPS),
}

ORDERS = ("balanced", "longest")
"""The first is the default. The second is for a load that is there at once: who comes last cannot be long then."""
CLASS = "batch"  # nobody waits for these requests: what counts is when all are done

Round = tuple[list[Request], Turn]


def run(settings: Settings) -> list[dict[str, Any]]:
    found = []
    for order in ORDERS:
        rounds: dict[str, list[Round]] = {load: [] for load in LOADS}
        rng = settings.rng(TASK)  # the same for both
        with settings.pair(SEQS, {"graph": {"priority": {"without_deadline": order}}}, pin=True) as pair:
            pair.turn(drawn("images", REQUESTS, rng), rng)
            for _ in range(settings.rounds):
                for load in LOADS:
                    requests = drawn(load, REQUESTS, rng)
                    rounds[load].append((requests, pair.turn(requests, rng)))
        for load, own in rounds.items():
            found += record(load, order, own)
    rng = settings.rng(f"{TASK} simulated")
    draws = {load: partial(drawn, load) for load in LOADS}
    return found + balance_simulated.run(draws, SIMULATED_ROUNDS, SEQS, rng)


def drawn(load: str, number: int, rng: Random) -> list[Request]:
    """Return the requests of a wave."""
    return [replace(one, sla=CLASS) for one in LOADS[load](number, rng)]


def record(load: str, order: str, rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """Return the makespan, its value by the steps alone, and how busy replicas were, which tells the bottleneck."""
    spans = [[turn[name]["seconds"] for _, turn in rounds] for name in VARIANTS]
    stock, ours = spans
    found = [entry(TASK, "makespan", ours, stock, bar=Bar(0.85))]
    found[0]["of_stock_in_total"] = round(sum(ours) / sum(stock), 4)
    by_steps = [[one([r.says for r in requests]) for requests, _ in rounds] for one in (IN_ORDER[order], in_turns)]
    found.append(entry(TASK, "makespan by the steps alone", *by_steps, unit="steps"))
    found[-1]["of_stock_in_total"] = round(sum(by_steps[0]) / sum(by_steps[1]), 4)
    for which, place in (("busiest", -1), ("other", 0)):
        shares = {
            name: [sorted(replica_seconds(turn[name]))[place] / turn[name]["seconds"] for _, turn in rounds]
            for name in VARIANTS
        }
        label = f"CPU time of the {which} replica, of the makespan"
        found.append(entry(TASK, label, shares[OURS], shares[STOCK], unit="share"))
    cores = {
        name: [sum(turn[name]["cpu_seconds"].values()) / turn[name]["seconds"] for _, turn in rounds]
        for name in VARIANTS
    }
    found.append(entry(TASK, "cores busy with the pipeline", cores[OURS], cores[STOCK], unit="cores"))
    others = [different(turn[OURS], turn[STOCK]) for _, turn in rounds]
    found.append(entry(TASK, "answers other than stock's", others, unit="answers"))
    skews = [skew(requests) for requests, _ in rounds]
    found.append(entry(TASK, "costliest by the median request", skews, unit="times"))
    return [one | {"measure": f"{load}, {balance_simulated.TITLES[order]}: {one['measure']}"} for one in found]


def replica_seconds(wave: dict[str, Any]) -> list[float]:
    return [seconds for who, seconds in wave["cpu_seconds"].items() if who.startswith("1/")]


def first_free(costs: Sequence[float]) -> float:
    """Return the makespan if each request goes, in order, to the replica that is free first."""
    return balance_simulated.first_free(costs, REPLICAS)


def longest_first(costs: Sequence[float]) -> float:
    return first_free(sorted(costs, reverse=True))


def balanced(costs: Sequence[float]) -> float:
    return balance_simulated.balanced(costs, REPLICAS)


IN_ORDER = {"arrival": first_free, "balanced": balanced, "longest": longest_first}
"""Makespans by the costs alone, for each order."""


def in_turns(costs: Sequence[float]) -> float:
    """Return the makespan of round-robin."""
    return max(sum(costs[first::REPLICAS]) for first in range(REPLICAS))


def skew(requests: Sequence[Request]) -> float:
    costs = [request.says for request in requests]
    return max(costs) / statistics.median(costs)

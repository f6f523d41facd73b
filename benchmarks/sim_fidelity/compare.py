"""Compare the measured engine with the simulated one: figures, and whether they are close enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.stats import Summary, quantile
from benchmarks.sim_fidelity import SHOULD_BE
from benchmarks.sim_fidelity.simulate import simulate
from vllm_omni_sched.sim.costs.measured import MeasuredCosts
from vllm_omni_sched.sim.measure import Histogram

Rounds = Sequence[dict[str, Any]]
"""Each has ``variant``, ``load``, ``seed``, and ``requests`` and ``references`` as `serve.py` tells them."""

PARTS = {"P50": 0.5, "P99": 0.99}


def compare(rounds: Rounds, costs: MeasuredCosts) -> list[dict[str, Any]]:
    """Return one record for each variant, load and figure, over the requests of all its rounds."""
    found = []
    for (variant, load), own in grouped(rounds):
        for name, (measured, simulated) in series(own, costs).items():
            for part, q in PARTS.items():
                real, sim = quantile(measured, q), simulated[part]
                off = sim / real - 1
                found.append(
                    {
                        "variant": variant,
                        "load": load,
                        "measure": f"{name} {part}",
                        "measured_ms": round(1e3 * real, 3),
                        "simulated_ms": round(1e3 * sim, 3),
                        "off": round(off, 4),
                        "within": abs(off) <= SHOULD_BE[part],
                        "samples": len(measured),
                        # how far rounds of the same load are apart by themselves
                        "measured_rounds_ms": rounds_apart(name, own, q),
                    }
                )
    return found


def series(rounds: Rounds, costs: MeasuredCosts) -> dict[str, tuple[list[float], dict[str, float]]]:
    """Return, by figure, all measured values in seconds, and P50 and P99 of the simulated ones."""
    itl, ttft = Histogram(), []
    for one in rounds:
        ttft += simulate(costs, one, itl)
    of_ttft = {part: quantile(ttft, q) for part, q in PARTS.items()}
    of_itl = {part: itl.quantile(q) for part, q in PARTS.items()}
    return {"TTFT": (ttfts(rounds), of_ttft), "ITL": (gaps(rounds), of_itl)}


def grouped(rounds: Rounds) -> list[tuple[tuple[str, float | None], list[dict[str, Any]]]]:
    """Return the rounds by variant, stock first: all of them (None), then by load."""
    found: list[tuple[tuple[str, float | None], list[dict[str, Any]]]] = []
    for variant in sorted({one["variant"] for one in rounds}, reverse=True):
        own = [one for one in rounds if one["variant"] == variant]
        found.append(((variant, None), own))
        for load in sorted({one["load"] for one in own}, reverse=True):
            found.append(((variant, load), [one for one in own if one["load"] == load]))
    return found


def ttfts(rounds: Rounds) -> list[float]:
    """Return the TTFT of all requests, in seconds."""
    return [request["ttft"] for one in rounds for request in one["requests"]]


def gaps(rounds: Rounds) -> list[float]:
    """Return the times between outputs of all requests, in seconds."""
    return [gap for one in rounds for request in one["requests"] for gap in request["gaps"]]


def rounds_apart(name: str, rounds: Rounds, q: float) -> dict[str, float]:
    """Return a summary of the same figure round by round, in milliseconds."""
    values = [ttfts([one]) if name == "TTFT" else gaps([one]) for one in rounds]
    return Summary.of([1e3 * quantile(own, q) for own in values if own]).as_dict(3)

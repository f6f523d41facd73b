"""The pipeline, measured against simulated: figures, and whether they are near enough."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.stats import Summary, quantile
from benchmarks.sim_fidelity import SHOULD_BE
from benchmarks.sim_fidelity.pipeline_fit import Fitted
from benchmarks.sim_fidelity.pipeline_simulate import simulated

PARTS = {"P50": 0.5, "P99": 0.99}
MEASURES = ("TTFT", "ITL", "end to end")
BARRED = ("TTFT", "ITL")  # the others are shown only

Waves = Sequence[dict[str, Any]]
"""Each has ``variant``, ``arrivals``, ``load``, ``seed``, ``pace`` and ``told`` as `pipeline_serve.py` tells it."""


@dataclass
class Series:
    """Seconds of all requests, or gaps, of some waves: measured, and simulated."""

    measured: list[float] = field(default_factory=list)
    simulated: list[float] = field(default_factory=list)


def group_of(wave: dict[str, Any]) -> tuple[str, str, float]:
    """What is compared with itself: the variant, how requests arrive, and the load."""
    return wave["variant"], wave["arrivals"], wave["load"]


def grouped(waves: Waves) -> list[tuple[tuple[str, str, float], list[dict[str, Any]]]]:
    """Waves by their group, stock first."""
    # "stock" comes after "ours" by name
    ordered = sorted(waves, key=lambda wave: (wave["variant"] != "stock", *group_of(wave)))
    return [(name, list(own)) for name, own in itertools.groupby(ordered, group_of)]


def series(waves: Waves, fitted: Fitted, folder: Path) -> dict[str, Series]:
    """By measure."""
    found = {name: Series() for name in MEASURES}
    for wave in waves:
        for name, values in measured(wave).items():
            found[name].measured += values
        again = simulated(fitted, wave, folder)
        found["TTFT"].simulated += again.ttft
        found["end to end"].simulated += again.end
        found["ITL"].simulated += again.gaps
    return found


def measured(wave: dict[str, Any]) -> dict[str, list[float]]:
    """By measure, seconds as the client saw them."""
    told = wave["told"]
    return {
        "TTFT": [one["outputs"][0] for one in told],
        "ITL": [after - before for one in told for before, after in itertools.pairwise(one["outputs"])],
        "end to end": [one["end"] for one in told],
    }


def compare(group: tuple[str, str, float], waves: Waves, found: dict[str, Series]) -> list[dict[str, Any]]:
    """One record for each figure, over the requests of all waves of the group."""
    variant, arrivals, load = group
    records = []
    for name, both in found.items():
        for part, q in PARTS.items():
            real, sim = quantile(both.measured, q), quantile(both.simulated, q)
            record = {
                "variant": variant,
                "arrivals": arrivals,
                "load": load,
                "measure": f"{name} {part}",
                "measured_ms": round(1e3 * real, 3),
                "simulated_ms": round(1e3 * sim, 3),
                "off": round(sim / real - 1, 4),
                "samples": len(both.measured),
                # how far waves of the same load are apart by themselves
                "measured_waves_ms": Summary.of([1e3 * quantile(measured(wave)[name], q) for wave in waves]).as_dict(3),
            }
            if name in BARRED:
                record["within"] = abs(sim / real - 1) <= SHOULD_BE[part]
            records.append(record)
    return records

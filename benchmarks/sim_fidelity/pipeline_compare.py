"""Compare the measured pipeline with the simulated one: figures, and whether they are close enough."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.stats import Summary, quantile
from benchmarks.sim_fidelity import SHOULD_BE

PARTS = {"P50": 0.5, "P99": 0.99}
MEASURES = ("TTFT", "ITL", "end to end")
BARRED = ("TTFT", "ITL")  # the others are shown only
ALL = "all"

Values = Mapping[str, list[float]]
"""Seconds by measure."""


@dataclass(frozen=True)
class Pair:
    """One wave as it was measured, and once more as it was simulated."""

    wave: Mapping[str, Any]
    measured: Values
    simulated: Values


Group = tuple[str, str, float | None]
"""Variant, how requests arrive, and the load; ``all`` and None: of all its waves."""


def measured(told: Sequence[Mapping[str, Any]]) -> Values:
    """Return the times of a wave as the client saw them."""
    return {
        "TTFT": [one["outputs"][0] for one in told],
        "ITL": [after - before for one in told for before, after in itertools.pairwise(one["outputs"])],
        "end to end": [one["end"] for one in told],
    }


def grouped(pairs: Sequence[Pair]) -> list[tuple[Group, list[Pair]]]:
    """Return each variant as a whole, stock first, and then by load."""

    def whole(pair: Pair) -> Group:
        return pair.wave["variant"], ALL, None

    def load(pair: Pair) -> Group:
        return pair.wave["variant"], pair.wave["arrivals"], pair.wave["load"]

    keys: list[Callable[[Pair], Group]] = [whole, load]
    found = {key: [pair for pair in pairs if of(pair) == key] for of in keys for key in map(of, pairs)}
    # "stock" comes after "ours" by name
    ordered = sorted(found, key=lambda group: (group[0] != "stock", group[1] != ALL, group[1], group[2] or 0.0))
    return [(group, found[group]) for group in ordered]


def values(pairs: Sequence[Pair], name: str) -> tuple[list[float], list[float]]:
    """Return all measured and all simulated values of one measure."""
    real = [value for pair in pairs for value in pair.measured[name]]
    return real, [value for pair in pairs for value in pair.simulated[name]]


def compare(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return one record for each group and figure, over the requests of all its waves."""
    return [record for group, own in grouped(pairs) for name in MEASURES for record in _records(group, own, name)]


def _records(group: Group, pairs: Sequence[Pair], name: str) -> list[dict[str, Any]]:
    variant, arrivals, load = group
    real, simulated = values(pairs, name)
    found = []
    for part, q in PARTS.items():
        was, says = quantile(real, q), quantile(simulated, q)
        record: dict[str, Any] = {
            "variant": variant,
            "arrivals": arrivals,
            "load": load,
            "measure": f"{name} {part}",
            "measured_ms": round(1e3 * was, 3),
            "simulated_ms": round(1e3 * says, 3),
            "off": round(says / was - 1, 4),
            "samples": len(real),
            # how far waves of the same load are apart by themselves
            "measured_waves_ms": Summary.of([1e3 * quantile(one.measured[name], q) for one in pairs]).as_dict(3),
        }
        if name in BARRED:
            record |= {"bar": SHOULD_BE[part], "within": abs(says / was - 1) <= SHOULD_BE[part]}
        found.append(record)
    return found

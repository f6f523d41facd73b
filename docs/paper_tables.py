"""Tables of the studies `paper` and `ablation`, from the files that simulations have left: no number is written here.

A file that is not there leaves `NOTHING` in its place.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from result_tables import NOTHING, table

STUDIES = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "studies"
SYSTEMS = ("baseline", "split", "ours")

Record = Mapping[str, Any]


def study(name: str, folder: Path = STUDIES) -> Mapping[str, Any] | None:
    """The file of a study, if it is there."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def source(body: Mapping[str, Any]) -> str:
    """Where the numbers come from, in one paragraph."""
    p = body["provenance"]
    return f"\n*Simulated: `{p['command']}`, {p['date'][:10]}, revision {p['revision']}, seed {p['seed']}.*\n"


def searched(body: Mapping[str, Any], less: bool = False) -> str:
    """What was searched for, of each system in a column, and by what ours is better.

    Args:
        less: the smaller one is the better one.
    """
    rows = []
    for (name, values), systems in _lines(body).items():
        found = {system: one["found"]["value"] for system, one in systems.items() if one.get("found")}
        rows.append(
            [
                ", ".join([name, *(f"{value} embeddings a frame" for value in values)]),
                *(_at_least(systems, system) + _number(found.get(system)) for system in _systems(body)),
                _ratio(found.get("ours"), found.get("baseline"), less),
                _ratio(found.get("ours"), found.get("split"), less),
            ]
        )
    return table(("", *_systems(body), "ours to baseline", "ours to split"), rows) + source(body)


def utilisation(body: Mapping[str, Any]) -> str:
    """How busy each stage was, of each system in a column."""
    rows = []
    for (name, values), systems in _lines(body).items():
        cells = [_busy(systems[system]["summary"]["utilisation"]) for system in _systems(body) if system in systems]
        rows.append([", ".join([name, *(f"{value} embeddings a frame" for value in values)]), *cells])
    return table(("", *_systems(body)), rows) + source(body)


def ablation(body: Mapping[str, Any]) -> str:
    """A row for each mechanism: alone → left out, of each measure."""
    by = {one["variant"]: one["summary"] for one in body["results"] if "summary" in one}
    named = [name.removeprefix("only ") for name in by if name.startswith("only ")]
    pairs = [("none → all", "none", "all"), *((name, f"only {name}", f"all but {name}") for name in named)]
    rows = [
        [said, *(f"{_number(of(by[first]))} → {_number(of(by[second]))}" for of in _MEASURES.values())]
        for said, first, second in pairs
        if first in by and second in by
    ]
    head = ("alone → all but it", *_MEASURES)
    return table(head, rows) + source(body)


_MEASURES: Mapping[str, Callable[[Record], float | None]] = {
    "within the SLO, requests/s": lambda one: one["goodput_per_second"],
    "part within the SLO": lambda one: one["within_slo"],
    "ITL P99, ms": lambda one: _ms(one["itl_seconds"]["p99"]),
    "TTFT P50, s": lambda one: one["ttft_seconds"]["p50"],
    "TTFT P99, s": lambda one: one["ttft_seconds"]["p99"],
}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _lines(body: Mapping[str, Any]) -> dict[tuple[str, tuple[Any, ...]], dict[str, Record]]:
    """Records by what they have in common, then by system: variants are named `WHAT: SYSTEM` or `WHAT SYSTEM`."""
    lines: dict[tuple[str, tuple[Any, ...]], dict[str, Record]] = {}
    for one in body["results"]:
        name, system = _named(one["variant"])
        lines.setdefault((name, tuple(one["values"].values())), {})[system] = one
    return lines


def _named(variant: str) -> tuple[str, str]:
    first, colon, last = variant.rpartition(": ")
    return (first, last) if colon else (variant.rpartition(" ")[0], variant.rpartition(" ")[2])


def _systems(body: Mapping[str, Any]) -> Sequence[str]:
    return list(dict.fromkeys([*SYSTEMS, *(_named(one["variant"])[1] for one in body["results"])]))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _at_least(systems: Mapping[str, Record], system: str) -> str:
    """What was searched for is more where all that came was served."""
    found = systems.get(system, {}).get("found") or {}
    return "" if found.get("saturated", True) else "≥ "


def _ratio(ours: float | None, other: float | None, less: bool) -> str:
    if not ours or not other:
        return ""
    return f"{other / ours if less else ours / other:.2f}x"


def _busy(stages: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{stage} {100 * parts['all']:.0f} %" for stage, parts in stages.items())


def _of(name: str, draw: Callable[[Mapping[str, Any]], str]) -> Callable[[], str]:
    def part() -> str:
        body = study(name)
        return NOTHING if body is None else draw(body)

    return part


PARTS = {
    "paper-rate": _of("paper", searched),
    "paper-slo": _of("paper-slo", lambda body: searched(body, less=True)),
    "paper-throughput": _of("paper-throughput", searched),
    "paper-utilisation": _of("paper-throughput", utilisation),
    "paper-decoding": _of("paper-decoding", searched),
    "paper-assumptions": _of("paper-assumptions", searched),
    "ablation": _of("ablation", ablation),
    "ablation-mixed": _of("ablation-mixed", ablation),
    "ablation-failures": _of("ablation-failures", ablation),
}
"""By the names that pages use."""

"""Tables of the studies `paper` and `lending`, from the files that simulations have left: no number is written here.

A file that is not there leaves `NOTHING` in its place.
"""

import functools
import json
import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from result_tables import NOTHING, short, table

from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.costs.roofline import Efficiency, engine_costs
from vllm_omni_sched.sim.scenario.scenario import Scenario
from vllm_omni_sched.sim.scenario.stages import EngineStage
from vllm_omni_sched.sim.study.plan import load_study
from vllm_omni_sched.sim.study.report import interval, ratio_interval
from vllm_omni_sched.sim.work import Request
from vllm_omni_sched.sim.workloads import base, registry

ROOT = Path(__file__).resolve().parent.parent
STUDIES, FILES = ROOT / "benchmarks" / "results" / "studies", ROOT / "benchmarks" / "studies"
BEST, SPLIT, OURS = "stock at its best", "split at its best", "ours at its best"

Record = Mapping[str, Any]


def study(name: str, folder: Path = STUDIES) -> Mapping[str, Any] | None:
    """Read the file of a study; return None if there is none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def source(body: Mapping[str, Any]) -> str:
    """Tell in one paragraph where the numbers come from."""
    p, seeds = body["provenance"], sorted({one["seed"] for one in body["results"]})
    several = f"seeds {seeds[0]} to {seeds[-1]}, mean ± half of the 95 % interval" if len(seeds) > 1 else "one seed"
    return f"\n*Simulated: `{short(p['command'])}`, {p['date'][:10]}, revision {p['revision']}, {several}.*\n"


def searched(body: Mapping[str, Any], less: bool = False) -> str:
    """Show what was searched for, of each system in a column, and by what ours is better than stock and split.

    Args:
        less: the smaller one is the better one.
    """
    systems = _systems(body)
    others = [system for system in (BEST, SPLIT) if system in systems]
    rows = []
    for case, found in _cases(body).items():
        values = {system: _found(found.get(system, ())) for system in systems}
        rows.append(
            [
                case,
                *(_unsure(found.get(system, ())) + _interval(values[system]) for system in systems),
                *(_ratio(values.get(OURS, []), values[other], less) for other in others),
            ]
        )
    return table(("", *systems, *(f"ours to {other}" for other in others)), rows) + source(body)


def bounds(body: Mapping[str, Any]) -> str:
    """Show what the operations of a request allow a node to serve, beside what systems do: no scheduler can do more.

    A request's operations are those of its encode, of its prompt, and of its answer, at the efficiencies of the costs;
    waiting, memory and links cost nothing here. The bound is the largest over all ways to split the node.
    """
    rows = []
    for case, found in _cases(body).items():
        most = _bounds("paper.toml").get(case, 0.0)
        best, ours = _found(found[BEST]), _found(found.get(OURS, ()))
        if not best or not ours or not most:
            continue
        rows.append(
            [
                case,
                _number(most),
                _percent(statistics.fmean(best) / most),
                _percent(statistics.fmean(ours) / most),
                f"{most / statistics.fmean(best):.2f}x",
            ]
        )
    head = ("", "bound, requests/s", "stock at its best", "ours", "most over stock at its best")
    return table(head, rows) + source(body)


# ---- the paper's summary, point by point

_PAPER = {
    "TTFT at 30 requests at a time, P50, s": (1.8, 0.9),
    "queries per second": (12.0, 52.0),
    "requests at a time with a TTFT of 2 s": (30.0, 90.0),
    "GPUs busy, of the operations they allow": (0.38, 0.78),
}
_BASELINE = "decoding on cores, encoders apart"
_MARK = 0.8  # of the paper's gain: from there on it counts as reproduced


def points(body: Mapping[str, Any], concurrency: Mapping[str, Any] | None) -> str:
    """Show the summary of the paper beside closed-loop simulations, and whether the gain is reproduced."""
    rows = []
    cases = dict.fromkeys(_split(one["variant"], _systems(body))[0] for one in body["results"])
    for case in cases:
        for what, (before, after) in _PAPER.items():
            base_values = _point(body, concurrency, case, _BASELINE, what)
            ours = _point(body, concurrency, case, "ours", what)
            if not base_values or not ours:
                continue
            gain, paper = _gain(base_values, ours, what), _gain([before], [after], what)
            percent = what.startswith("GPUs")
            said = _percent if percent else _number
            mark = "reproduced" if gain >= _MARK * paper else "*not reproduced*"
            rows.append(
                [
                    f"{case}: {what}",
                    f"{said(before)} → {said(after)}, {paper:.1f}x",
                    f"{_interval(base_values, percent)} → {_interval(ours, percent)}, {gain:.1f}x",
                    mark,
                ]
            )
    shown = table(("", "the paper's summary", "simulated", ""), rows) + source(body)
    return shown if concurrency is None else shown + source(concurrency)


def _gain(before: Sequence[float], after: Sequence[float], what: str) -> float:
    ratio = statistics.fmean(after) / statistics.fmean(before)
    return 1 / ratio if what.startswith("TTFT") else ratio


def _point(
    body: Mapping[str, Any], concurrency: Mapping[str, Any] | None, case: str, system: str, what: str
) -> list[float]:
    """Return a value for each seed."""
    if what.startswith("requests at a time"):
        records = [] if concurrency is None else concurrency["results"]
        return _found([one for one in records if one["variant"] == f"{case}: {system}" and "found" in one])
    records = [one for one in body["results"] if one["variant"] == f"{case}: {system}" and "summary" in one]
    loads = sorted({one["values"]["workload.concurrency"] for one in records})
    if not loads:
        return []
    wanted = loads[0] if what.startswith("TTFT") else loads[-1]
    records = [one for one in records if one["values"]["workload.concurrency"] == wanted]
    if what.startswith("TTFT"):
        return [one["summary"]["ttft_seconds"]["p50"] for one in records]
    if what.startswith("queries"):
        return [one["summary"]["requests_per_second"] for one in records]
    parts = [one["summary"].get("operations") for one in records]
    return [] if None in parts else parts


# ---- bounds


@functools.cache
def _bounds(file: str) -> dict[str, float]:
    """Return, by case, the requests/s that a node of 8 can serve by operations alone, however it is split."""
    most: dict[str, float] = {}
    points = load_study(FILES / file).points
    for point in points:
        if point.seed != points[0].seed:  # the same requests, of other seeds
            continue
        case = point.label.rpartition(": ")[0]
        layouts = point.choices.get("layout", ({},))
        for layout in layouts:
            scenario = point.chosen({name: values[0] for name, values in point.choices.items()} | {"layout": layout})
            if case:
                most[case] = max(most.get(case, 0.0), _operations_bound(scenario.scenario()))
    return most


def _operations_bound(scenario: Scenario) -> float:
    """Return what all devices of a node can do of the operations of such requests, however they are shared out."""
    stage = next(one for one in scenario.stages if isinstance(one, EngineStage))
    costs = engine_costs(stage.name, scenario.cluster.device, stage.model, None, stage.devices, Efficiency())
    stream = base.requests(registry.build({"kind": scenario.workload.kind, **scenario.workload.table()}), scenario.seed)
    seconds = statistics.fmean(_operations_seconds(costs, next(stream)) for _ in range(_DRAWN))
    return scenario.cluster.devices_per_node / stage.devices / seconds


_DRAWN = 16_000  # requests over which operations are averaged: to within a percent
_MUCH = 1_000_000  # tokens: a step of so many is bound by operations, and one more costs what its operations cost


def _operations_seconds(costs: EngineCosts, request: Request) -> float:
    """Return a request's seconds by its operations alone, as if weights were read once for thousands of requests."""

    encode = sum(costs.encode_seconds(item.modality, item.embeds) for item in request.items)
    alone = costs.step_seconds(0, 0, _MUCH, 0.0)
    prompt, out = request.prompt_tokens, request.output_tokens
    prefill = costs.step_seconds(0, 0, _MUCH + prompt, prompt * prompt / 2) - alone
    return encode + prefill + costs.step_seconds(out, out * (prompt + out // 2), _MUCH, 0.0) - alone


def _measured(summaries: Sequence[Record], of: Callable[[Record], float | None]) -> str:
    return _interval([value for one in summaries if (value := of(one)) is not None])


# ---- memory lent to encodes


def lending(body: Mapping[str, Any]) -> str:
    """Show a row for each load and way to set memory aside; the ratio is of goodput to that of memory all day."""
    rows, by = [], _by_load(body)
    for load, found in by.items():
        for variant, summaries in found.items():
            goodput = [one["goodput_per_second"] for one in summaries]
            against = [one["goodput_per_second"] for one in found.get(_ALL_DAY, ())]
            rows.append(
                [
                    f"{load:g} requests/s, {variant}",
                    *(_measured(summaries, of) for of in _LENDING.values()),
                    "" if variant == _ALL_DAY else _ratio(goodput, against, less=False),
                ]
            )
    return table(("", *_LENDING, f"goodput to {_ALL_DAY}"), rows) + source(body)


def _by_load(body: Mapping[str, Any]) -> dict[float, dict[str, list[Record]]]:
    by: dict[float, dict[str, list[Record]]] = {}
    for one in sorted(body["results"], key=lambda one: one["seed"]):
        if one.get("summary"):
            load = by.setdefault(one["values"]["workload.rate"], {})
            load.setdefault(one["variant"], []).append(one["summary"])
    return dict(sorted(by.items()))


_ALL_DAY = "all day"
_LENDING: Mapping[str, Callable[[Record], float | None]] = {
    "goodput, requests/s": lambda one: one["goodput_per_second"],
    "TTFT P99, s": lambda one: one["ttft_seconds"]["p99"],
}


# ---- the README's sentence


def headline(body: Mapping[str, Any], slo: Mapping[str, Any] | None, saturated: Mapping[str, Any] | None) -> str:
    """Return the results of the simulated comparison in some sentences, against the better layout of vLLM each time."""
    rates = _over_better(body)
    if not rates:
        return NOTHING
    least, most = min(rates, key=rates.__getitem__), max(rates, key=rates.__getitem__)
    said = (
        "Simulated on a node of 8 A100 that answers questions about videos, and compared with the better of vLLM in "
        "one engine and vLLM with encoders on GPUs of their own, each tuned by the same search, this package serves "
        f"{rates[least]:.2f} ({least}) to {rates[most]:.2f} times ({most}) the requests within the SLO"
    )
    winners = [body]
    if slo is not None and (tighter := _over_better(slo, less=True).values()):
        said += f", or keeps an SLO {_between(tighter)} times as tight"
        winners.append(slo)
    lanes = [
        _lane(found[OURS][0]["tuned"]["chosen"])
        for one in winners
        for found in _cases(one).values()
        if found.get(OURS) and found[OURS][0].get("tuned")
    ]
    said += f". The search turned the lane on in {sum(lanes)} of {len(lanes)} of these cases"
    if saturated is not None and (gains := _over_best(saturated).values()):
        said += (
            f"; with the lane and its defaults, a saturated node has {_between(gains)} times the throughput of vLLM in "
            "one engine"
        )
    return said + (
        ". No GPU has confirmed it, and on the only one that the simulator was compared with, it took stock for slower "
        "than it is.\n"
    )


def _between(values: Collection[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _lane(chosen: Mapping[str, Any]) -> bool:
    """Return whether a search turned the lane on, by itself or as a part of a layout."""
    groups = (chosen, *(one for one in chosen.values() if isinstance(one, Mapping)))
    return any(group.get("policy.encode_ahead") is True for group in groups)


def _over_better(body: Mapping[str, Any], less: bool = False) -> dict[str, float]:
    """Return by what ours is better than the better layout of vLLM, by case; without a value, a layout is left out."""
    found = {}
    for case, systems in _cases(body).items():
        ours = _found(systems.get(OURS, ()))
        others = [values for one in (BEST, SPLIT) if (values := _found(systems.get(one, ())))]
        if ours and others:
            best = (min if less else max)(others, key=statistics.fmean)
            found[case] = ratio_interval(best, ours)[0] if less else ratio_interval(ours, best)[0]
    return found


def _over_best(body: Mapping[str, Any]) -> dict[str, float]:
    """Return what was searched, of ours over stock at its best, by case; cases without a value are left out."""
    ratios = {}
    for case, found in _cases(body).items():
        ours, best = _found(found.get(OURS, ())), _found(found.get(BEST, ()))
        if ours and best:
            ratios[case] = ratio_interval(ours, best)[0]
    return ratios


# ---- how numbers are written


def _split(variant: str, systems: Sequence[str]) -> tuple[str, str]:
    for system in systems:
        if variant.endswith(f": {system}"):
            return variant[: -len(system) - 2], system
    return "", variant


def _cases(body: Mapping[str, Any]) -> dict[str, dict[str, list[Record]]]:
    """Records of all seeds, by case and system."""
    cases: dict[str, dict[str, list[Record]]] = {}
    for one in body["results"]:
        case, system = _split(one["variant"], _systems(body))
        case = ", ".join([case, *(f"{key.split('.')[-1]} {value}" for key, value in one["values"].items())])
        cases.setdefault(case, {}).setdefault(system, []).append(one)
    return cases


def _systems(body: Mapping[str, Any]) -> Sequence[str]:
    return list(dict.fromkeys(one["variant"].rpartition(": ")[2] for one in body["results"]))


def _found(records: Sequence[Record]) -> list[float]:
    """Return a value for each seed, in the order of the seeds; none where one seed has none."""
    values = [(one.get("found") or {}).get("value") for one in sorted(records, key=lambda one: one["seed"])]
    return [] if any(value is None for value in values) else values


def _interval(values: Sequence[float], percent: bool = False) -> str:
    if not values:
        return ""
    times = 100 if percent else 1
    mean, half = interval([times * value for value in values])
    unit = " %" if percent else ""
    if len(values) < 2:
        return _number(mean) + unit
    digits = max(0, 2 - math.floor(math.log10(abs(mean)))) if mean else 2
    return f"{mean:,.{digits}f} ± {half:,.{digits}f}{unit}"


def _ratio(ours: Sequence[float], other: Sequence[float], less: bool) -> str:
    if not ours or len(ours) != len(other) or min(*ours, *other) <= 0:
        return ""
    ratio, low, high = ratio_interval(other, ours) if less else ratio_interval(ours, other)
    return f"{ratio:.2f}x" if len(ours) < 2 else f"{ratio:.2f}x ({low:.2f} to {high:.2f})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _unsure(records: Sequence[Record]) -> str:
    """Return a mark for a found value that is only a lower bound, because everything that arrived was served."""
    return "" if all((one.get("found") or {}).get("saturated", True) for one in records) else "≥ "


def _of(name: str, draw: Callable[[Mapping[str, Any]], str], picture: str = "") -> Callable[[], str]:
    """Return the maker of a page's part; with the words for a picture, the study's picture is below."""

    def part() -> str:
        body = study(name)
        if body is None:
            return NOTHING
        file = STUDIES / f"{name}-cases.png"
        shown = f"\n![{picture}](../../benchmarks/results/studies/{file.name})\n" if picture and file.exists() else ""
        return draw(body) + shown

    return part


PARTS = {
    "paper-rate": _of("paper", searched, "Requests within the SLO of each system, by model and clips"),
    "paper-bounds": _of("paper", bounds),
    "paper-slo": _of(
        "paper-slo",
        lambda body: searched(body, less=True),
        "Smallest factor on the SLO's times that is met, of each system, by model and clips",
    ),
    "paper-throughput": _of("paper-throughput", searched, "Tokens per second of each system, by model and clips"),
    "paper-decoding": _of("paper-decoding", searched, "Tokens per second of each system, by what decoding costs"),
    "paper-points": _of("paper-points", lambda body: points(body, study("paper-concurrency"))),
    "paper-headline": _of("paper", lambda body: headline(body, study("paper-slo"), study("paper-decoding"))),
    "study-lending": _of("lending", lending),
}
"""By the names that pages use."""

"""Make the table of what each profile has shown, by kind of traffic, from committed results alone.

What a measure gets is not chosen by hand: its interval decides whether it is in the column of what gets better, of what
gets worse, or of what is not decided.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from result_tables import (
    SESSION,
    Result,
    Run,
    compared,
    hardware,
    pairs,
    plain_table,
    ratio,
    ratios,
    runs,
    vllm_of,
    written,
)

from vllm_omni_sched.config.profiles import PROFILES, Profile

HEADER = ("my traffic", "profile", "measured on", "better", "worse", "not decided")
NOT_MEASURED = "not on an idle machine yet"
MIXED = {
    "image TTFT P50": "picture TTFT P50",
    "image TTFT P99": "picture TTFT P99",
    "ITL beside images P50": "ITL while pictures wait P50",
    "ITL beside images P99": "ITL while pictures wait P99",
    "text TTFT P99": "text TTFT P99",
    "text ITL P50": "text ITL P50",
    "text ITL P99": "text ITL P99",
    "within SLO %": "requests within their SLO",
}
"""Maps measures of `benchmarks.mixed` to the names in the table. Of the last, more is better."""
STEPS = {
    "realtime_frame": "one more frame of a session",
    "one_shot_prefill": "prefill of a prompt of items",
    "decode": "decode step of a request with items",
    "text_decode": "decode step of text requests",
    "text_prefill": "prefill of text prompts",
}
"""Maps scenarios of `benchmarks.step_cost` to the names in the table."""


LOADS = (0.25, 1.0)
"""Loads that the table tells of runs on a CPU; `docs/benchmarks.md` has all."""


class Seen(NamedTuple):
    """A measure as the table tells it: the range in which its ratio to stock lies, less being better."""

    text: str
    low: float
    high: float


def gains(results: Mapping[str, Sequence[Result]]) -> str:
    """Return the table; ``results``: those of each benchmark by its name."""
    rows = []
    for profile in Profile:
        name = "none" if profile is Profile.EXACT else f"`{profile.value}`"
        measured = list(_MEASURED[profile](results)) if profile in _MEASURED else []
        about = (PROFILES[profile].traffic, name)
        for where, seen in measured or [(NOT_MEASURED, ())]:
            rows.append((*about, where, *_sorted(seen)))
            about = ("", "")
    return plain_table(HEADER, rows)


def _sorted(seen: Iterable[Seen]) -> tuple[str, str, str]:
    better, worse, unclear = list[str](), list[str](), list[str]()
    for one in seen:
        (better if one.high < 1 else worse if one.low > 1 else unclear).append(one.text)
    return "; ".join(better), "; ".join(worse), "; ".join(unclear)


def _of_exact(results: Mapping[str, Sequence[Result]]) -> Iterable[tuple[str, Iterable[Seen]]]:
    """Tell what a step costs on model runner V2 at the least and at the largest size, and a frame in an engine."""
    for result in results.get("step_cost", ()):
        seen = []
        for scenario, words in STEPS.items():
            for size, stock, ours in pairs(result, scenario):
                low, high = ratios(stock, ours)
                before, after = (written(one["median"] * 1e3) for one in (stock, ours))
                seen.append(Seen(f"{words}, n = {size:,}: {before} → {after} ms", low, high))
        rounds = len(result["results"][0]["rounds"])
        yield f"{hardware(result)}: the scheduler's CPU time, model runner V2, {rounds} rounds", seen
    for result in results.get("realtime", ()):
        of = {
            run["variant"]: {b["frames"]: b["seconds_per_frame"]["median"] for b in run["buckets"]}
            for run in result["results"]
        }
        if {"stock", "ours"} <= of.keys() and (both := of["stock"].keys() & of["ours"].keys()):
            at, sessions = max(both), result["results"][0]["sessions"]
            stock, ours, last = of["stock"][at] * 1e3, of["ours"][at] * 1e3, max(of["ours"])
            told = f"each frame after {at:,}: {written(stock)} → {written(ours)} ms"
            if last > at:
                told += f" (after {last:,}, where stock was too slow to go on: {written(of['ours'][last] * 1e3)} ms)"
            several = "s" if sessions > 1 else ""
            where = f"{hardware(result)}: {sessions} session{several} in an engine, 1 run, no interval"
            yield where, [Seen(told, ours / stock, ours / stock)]


def _of_chat(results: Mapping[str, Sequence[Result]]) -> Iterable[tuple[str, Iterable[Seen]]]:
    return _of_mixed(results, "ours", "")


def _of_realtime(results: Mapping[str, Sequence[Result]]) -> Iterable[tuple[str, Iterable[Seen]]]:
    return _of_mixed(results, "realtime", SESSION)


def _of_mixed(results: Mapping[str, Sequence[Result]], ours: str, beside: str) -> Iterable[tuple[str, Iterable[Seen]]]:
    """Tell each place and load at which a profile was measured, by its run of the most rounds."""
    places: dict[tuple[bool, str, float], Run] = {}
    for run in runs(results.get("mixed", ()), results.get("gpu", ())):
        of_profile = (run.ours, run.beside) == (ours, beside)
        if of_profile and ("gpu" in run.result["provenance"] or run.load in LOADS):
            place = (run.shared, run.where, run.load)
            places[place] = max(places.get(place, run), run, key=lambda one: one.rounds)
    for (_, where, _), run in sorted(places.items()):
        seen = []
        for measure, name in MIXED.items():
            if both := compared(run, measure):
                stock, own = both
                value = own["median"] / stock["median"]
                low, high = own.get("ratio_interval", _quartiles(stock, own)) if run.rounds > 1 else (value, value)
                if measure == "within SLO %":
                    low, high = 1 / high, 1 / low
                seen.append(Seen(f"{name} {ratio(stock, own, run.rounds)}", low, high))
        asked = run.measures["image TTFT P50, all rounds together"][run.ours]["samples"]
        rounds = "1 round, no interval" if run.rounds == 1 else f"{run.rounds} rounds"
        what = f"load {run.load:g}" + (f" beside {beside}" if beside else "")
        yield f"{where}; {what}, {rounds}, {asked} requests with pictures", seen


def _of_video(results: Mapping[str, Sequence[Result]]) -> Iterable[tuple[str, Iterable[Seen]]]:
    """Tell the time to first token of requests with videos that come at once, with the loader alone."""
    for result in results.get("video_server", ()):
        measures: dict[str, dict[str, Mapping[str, float]]] = {}
        for record in result["results"]:
            measures.setdefault(record["measure"], {})[record["variant"]] = record
        seen = [
            Seen(f"{name} {of['ours']['of_stock']:.2g}x", *_quartiles(of["stock"], of["ours"]))
            for name, of in measures.items()
            if name == "TTFT P50"  # P99 is that of 16 requests
        ]
        at_once, rounds = result["provenance"]["workload"]["requests at once"], result["results"][0]["samples"]
        where = f"{hardware(result)}, vLLM {vllm_of(result)}: the video loader alone"
        yield f"{where}; {at_once} videos at once, {rounds} rounds", seen


def _quartiles(stock: Mapping[str, float], own: Mapping[str, float]) -> tuple[float, float]:
    """Return about what ratio two rounds have: from the upper quartile of stock's to the lower one of it, and back."""
    mine, base = own["iqr"] / 2, stock["iqr"] / 2
    return (own["median"] - mine) / (stock["median"] + base), (own["median"] + mine) / (stock["median"] - base)


_MEASURED = {Profile.EXACT: _of_exact, Profile.CHAT: _of_chat, Profile.REALTIME: _of_realtime, Profile.VIDEO: _of_video}

"""Make the table of gains by kind of traffic: its profile, and what was measured, from committed results alone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import result_tables
from result_tables import TOGETHER, Result

from vllm_omni_sched.config.profiles import PROFILES, Profile

NOT_MEASURED = "not measured yet"
MIXED = {
    "session update": {"P50": "session P50", "P99": "session P99"},
    "picture TTFT": {"P50": "image TTFT P50", "P99": "image TTFT P99"},
    "ITL while pictures wait": {"P99": "ITL beside images P99"},
    "text TTFT": {"P99": "text TTFT P99"},
    "tokens/s": {"": "tokens / s"},
}
"""Maps the names in the table to the measures of `benchmarks.mixed`."""
LONGER = {"text ITL": {"P50": "text ITL P50", "P99": "text ITL P99"}}
"""Maps the names of what gets longer to its measures: steps go on beside the encoder, where stock's stand still."""


def gains(results: Mapping[str, Sequence[Result]]) -> str:
    """Return the table; ``results``: those of each benchmark by its name."""
    rows = []
    for profile in Profile:
        words = "none" if profile is Profile.EXACT else f"`{profile.value}`"
        rows.append((PROFILES[profile].traffic, words, _GAINS[profile](results)))
    return result_tables.plain_table(("my traffic", "profile", "measured; 0.5x is half of stock"), rows)


def _of_exact(results: Mapping[str, Sequence[Result]]) -> str:
    """State the time of a frame where both were measured with the longest session, on the newest vLLM."""
    found = []
    for result in results.get("realtime", ()):
        of = {
            run["variant"]: {b["frames"]: b["seconds_per_frame"]["median"] for b in run["buckets"]}
            for run in result["results"]
        }
        if {"stock", "ours"} <= of.keys() and (both := sorted(of["stock"].keys() & of["ours"].keys())):
            found.append((_version(result), both[-1], result["results"][0]["sessions"], of))
    if not found:
        return NOT_MEASURED
    _, frames, sessions, of = max(found, key=lambda one: one[:3])
    stock, ours = of["stock"][frames] * 1e3, of["ours"][frames] * 1e3
    what = f"{sessions} session{'s' if sessions > 1 else ''} with {frames:,} frames"
    return f"{what}: {ours:.3g} ms for each further frame, stock {stock:.3g} ms"


def _of_mixed(variant: str, results: Mapping[str, Sequence[Result]]) -> str:
    """State the ratios to stock at load 1, or else at the highest load: the range over all runs on the newest vLLM."""
    runs = []
    for result in results.get("mixed", ()):
        own = [r for r in result["results"] if r["variant"] == variant and "ratio" in r]
        workload = result["provenance"]["workload"]
        plain = not workload["frames"] and workload.get("tensor_parallel", 1) == 1
        if own and (variant != "ours" or plain):
            runs.append(result)
    if not runs:
        return NOT_MEASURED
    newest = max(map(_version, runs))
    runs = [result for result in runs if _version(result) == newest]
    loads = {r["load"] for result in runs for r in result["results"] if r["variant"] == variant}
    load = 1.0 if 1.0 in loads else max(loads)
    ratios: dict[str, list[float]] = {}
    for result in runs:
        for name, ratio in _of_stock(result["results"], variant, load).items():
            ratios.setdefault(name, []).append(ratio)
    what = f"at load {load:g}" + (f", {len(runs)} runs" if len(runs) > 1 else "")
    longer = _said(LONGER, ratios)
    return f"{what}: {_said(MIXED, ratios)}" + (f"; in return, {longer}" if longer else "")


def _of_stock(records: Iterable[Mapping[str, Any]], variant: str, load: float) -> dict[str, float]:
    """Return the ratios of a variant to stock by measure: the pooled one where there is one, or else of the medians."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for record in records:
        if record["load"] == load:
            found.setdefault(record["variant"], {})[record["measure"]] = record
    stock, own = found.get("stock", {}), found.get(variant, {})
    ratios = {
        name: r["median"] / stock[name]["median"]
        for name, r in own.items()
        if r.get("median") is not None and stock.get(name, {}).get("median")
    }
    return ratios | {name.removesuffix(TOGETHER): r["ratio"] for name, r in own.items() if "ratio" in r}


def _said(measures: Mapping[str, Mapping[str, str]], ratios: Mapping[str, Sequence[float]]) -> str:
    """Write the ratios of the measures; of several runs, the least and the most."""
    said = []
    for name, ones in measures.items():
        found = [f"{which} {_range(ratios[one])}".lstrip() for which, one in ones.items() if one in ratios]
        if found:
            said.append(f"{name} {', '.join(found)}")
    return "; ".join(said)


def _range(ratios: Sequence[float]) -> str:
    least, most = f"{min(ratios):.2g}", f"{max(ratios):.2g}"
    return f"{least}x" if least == most else f"{least}x to {most}x"


def _of_video(results: Mapping[str, Sequence[Result]]) -> str:
    """State the time to first token of requests with videos that come at once, with the loader alone."""
    for result in results.get("video_server", ()):
        own = {r["measure"]: r for r in result["results"] if r["variant"] == "ours"}
        if "-polling" in result["provenance"]["command"] or not own:
            continue
        at_once = result["provenance"]["workload"]["requests at once"]
        ratios = ", ".join(f"{name} {own[name]['of_stock']:.2g}x" for name in ("TTFT P50", "TTFT P99"))
        version = ".".join(map(str, _version(result)))
        return f"by its video loader alone, {at_once} videos at once, vLLM {version}: {ratios}"
    return NOT_MEASURED


def _of_batch(results: Mapping[str, Sequence[Result]]) -> str:
    """State the encoder seconds spent on items that were encoded before, over all mixes and sizes of the cache."""
    spent: dict[tuple[str, int], dict[str, float]] = {}
    for result in results.get("encoder_cache", ()):
        for record in result["results"]:
            seconds = record["encoded_again_seconds"]["median"] + record["restore_seconds"]["median"]
            spent.setdefault((record["mix"], record["cache_embeds"]), {})[record["variant"]] = seconds
    if not spent:
        return NOT_MEASURED

    def between(variant: str) -> str:
        ratios = [of[variant] / of["stock"] for of in spent.values()]
        return f"{min(ratios):.2f}x to {max(ratios):.2f}x"

    return (
        f"encoder seconds for items seen before, simulated: {between('worth, measured')} of stock; "
        f"{between('worth + host')} with `encode_ahead` and `encoder_cache_host_bytes` as well"
    )


def _version(result: Result) -> tuple[int, ...]:
    text = str(result["provenance"]["versions"].get("vllm", "0")).split("+")[0]
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


_GAINS = {
    Profile.EXACT: _of_exact,
    Profile.CHAT: lambda results: _of_mixed("ours", results),
    Profile.REALTIME: lambda results: _of_mixed("realtime", results),
    Profile.VIDEO: _of_video,
    Profile.BATCH: _of_batch,
}

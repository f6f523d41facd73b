"""Tables of what the benchmarks of compression and of tiers have measured, from the result files they leave."""

from collections.abc import Mapping, Sequence
from typing import Any

from result_tables import NOTHING, Result, source, table

from benchmarks.tiers import VARIANTS

MEGA = 1e6


def compression(results: Sequence[Result]) -> str:
    """Show each kind of payload: its codec, its break-even speed, and what compression gains on each link."""
    parts = []
    for result in results:
        records = result["results"]
        links = list(dict.fromkeys(one["link"] for one in records if one["measure"] != "codec"))
        ours = {
            (one["kind"], one["link"]): one
            for one in records
            if (one["measure"], one.get("variant")) == ("serial", "ours")
        }
        rows = [
            (
                one["kind"],
                one["codec"],
                f"{one['fraction']:.2f}",
                f"{one['break_even_bytes_per_second']['serial'] / MEGA:,.0f}" if "encode_seconds" in one else "",
                *(_raw_over_ours(ours.get((one["kind"], link))) for link in links),
            )
            for one in records
            if one["measure"] == "codec"
        ]
        parts.append("\n" + table(("payload", "codec", "size", "break-even, MB/s", *links), rows) + source(result))
    return "".join(parts) or NOTHING


def _raw_over_ours(ours: Mapping[str, Any] | None) -> str:
    if ours is None:
        return ""
    low, high = ours["raw_over_it_quartiles"]
    return f"×{ours['raw_over_it']:.2f} ({low:.2f} to {high:.2f})"


def tiers(results: Sequence[Result]) -> str:
    """Show a burst larger than the arena: a row per measure, a column per variant, with quartiles' distance."""
    parts = []
    for result in results:
        lines: dict[str, dict[str, str]] = {}
        for one in result["results"]:
            measure = one["measure"]
            timed = measure.startswith(("put", "get", "burst"))
            scale = 1e3 if timed else 1 / (1 << 20) if measure.startswith("bytes") else 1.0
            ratio = f", ×{one['blocking_over_it']:.2g}" if "blocking_over_it" in one else ""
            spread = f" (±{one['iqr'] / 2 * scale:.2g}{ratio})" if timed else ""
            unit = ", ms" if timed else ", MB" if measure.startswith("bytes") else ""
            lines.setdefault(measure + unit, {})[one["variant"]] = f"{one['median'] * scale:,.4g}{spread}"
        variants = [variant for variant in VARIANTS if any(variant in line for line in lines.values())]
        rows = [(measure, *(line[variant] for variant in variants)) for measure, line in lines.items()]
        parts.append("\n" + table(("", *variants), rows) + source(result))
    return "".join(parts) or NOTHING

"""Tables of what the benchmarks of compression and of tiers have measured, from the result files they leave."""

from collections.abc import Mapping, Sequence
from typing import Any

from result_tables import NOTHING, Result, source, table

from benchmarks.tiers import VARIANTS

WAYS = ("serial", "pipelined")
MEGA = 1e6


def compression(results: Sequence[Result]) -> str:
    """Show each kind of payload: its codec and break-even speeds; then a row per kind and link."""
    parts = []
    for result in results:
        records = result["results"]
        codecs = [record for record in records if record["measure"] == "codec"]
        rows = [(one["kind"], one["codec"], f"{one['fraction']:.2f}", *_codec_cells(one)) for one in codecs]
        header = ("payload", "codec", "size", "encode ms", "decode ms", *(f"break-even {way}, MB/s" for way in WAYS))
        parts.append("\n" + table(header, rows))
        lines: dict[tuple[str, str], dict[tuple[str, str], Mapping[str, Any]]] = {}
        for one in records:
            if one["measure"] != "codec":
                lines.setdefault((one["kind"], one["link"]), {})[one["measure"], one["variant"]] = one
        rows = [
            (kind, link, *(_raw_over_ours(line[way, "ours"]) for way in WAYS)) for (kind, link), line in lines.items()
        ]
        header = ("time of raw over ours", "link", *WAYS)
        parts.append("\n" + table(header, rows) + source(result))
    return "".join(parts) or NOTHING


def _codec_cells(one: Mapping[str, Any]) -> tuple[str, ...]:
    if "encode_seconds" not in one:
        return ("",) * 4
    times = (f"{one[name]['median'] * 1e3:.2f}" for name in ("encode_seconds", "decode_seconds"))
    return (*times, *(f"{one['break_even_bytes_per_second'][way] / MEGA:,.0f}" for way in WAYS))


def _raw_over_ours(ours: Mapping[str, Any]) -> str:
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

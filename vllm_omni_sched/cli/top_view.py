"""The output of `vllm-omni-sched top`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_omni_sched.cli.console import plain_table, section
from vllm_omni_sched.core.engine.explanation import sentence_of
from vllm_omni_sched.core.engine.history_lines import HistoryLine
from vllm_omni_sched.monitor.server_frame import WHERE, Frame

NOTHING = "–"


@dataclass(frozen=True)
class Shown:
    """The state of a server, with the latest decisions about single requests; None: nobody asked for them."""

    frame: Frame
    decisions: tuple[HistoryLine, ...] | None = None


def json_of(shown: Shown, at: float) -> dict[str, Any]:
    """Return a state as JSON values; ``at``: seconds since 1970."""
    frame = shown.frame
    values = asdict(frame)
    values["encoder_cache"]["hit_rate"] = frame.encoder_cache.hit_rate
    for name, one in frame.slo.items():
        values["slo"][name]["fraction"] = one.fraction
    if shown.decisions is not None:
        values["decisions"] = msgspec.to_builtins(shown.decisions)
    return {"at": at, **values}


def view_of(shown: Shown, url: str, note: str = "") -> RenderableType:
    """Return a state as tables; ``note``: a line above them, such as why it is not of now."""
    frame = shown.frame
    span = "since the server started" if frame.seconds is None else f"in the last {frame.seconds:.0f} s"
    parts: list[RenderableType] = [Text.assemble((url, "bold"), f"   {_number(frame.steps)} steps {span}")]
    if note:
        parts.append(Text(note, "bold red"))
    parts += [Text(), _now(frame), Text(), _counts(frame)]
    if any(one.fraction is not None or one.ttft_p50_seconds is not None for one in frame.slo.values()):
        parts += [Text(), _slo(frame)]
    if frame.stages:
        parts += [Text(), _stages(frame)]
    if shown.decisions is not None:
        parts += [Text(), _decisions(shown.decisions)]
    return Group(*parts)


def _now(frame: Frame) -> Table:
    requests, lanes = frame.requests, frame.lanes
    waiting = _number(requests.waiting)
    if requests.waiting and requests.waiting_by_reason:
        waiting += f" ({_listed(requests.waiting_by_reason)})"
    table = section("now", "name", "value")
    table.add_row("running", _number(requests.running))
    table.add_row("waiting", waiting)
    if any(requests.waiting_by_class.values()):
        by_class = {name: count for name, count in requests.waiting_by_class.items() if count}
        table.add_row("waiting by class", _listed(by_class))
    table.add_row("streaming sessions", _number(requests.sessions))
    table.add_row("KV cache in use", _percent(requests.kv_cache_usage))
    table.add_row("lanes", f"{_number(lanes.pending)} items wait, share {_percent(lanes.share)}")
    if frame.encoder_cache.host_bytes:
        table.add_row("encodings in host memory", f"{frame.encoder_cache.host_bytes / (1 << 20):,.1f} MiB")
    return table


def _counts(frame: Frame) -> Table:
    lanes, cache = frame.lanes, frame.encoder_cache
    title = "since the start" if frame.seconds is None else f"in the last {frame.seconds:.0f} s"
    table = section(title, "name", "value")
    placed = {f"{reason} → {WHERE.get(reason, '?')}": count for reason, count in frame.placements.items()}
    table.add_row("placements", _listed(placed))
    if frame.rounds:
        table.add_row("encode rounds", _listed(frame.rounds))
    table.add_row("taken from the queue", _listed(frame.requests.admitted))
    encoded = f"{_number(lanes.items)} items encoded ahead"
    if lanes.wait_p50_seconds is not None:
        encoded += f", wait P50 {_seconds(lanes.wait_p50_seconds)}, P99 {_seconds(lanes.wait_p99_seconds)}"
    if lanes.busy is not None:
        encoded += f", {lanes.busy:.2f} encodes at a time"
    if lanes.failed or lanes.restarts:
        encoded += f", {_number(lanes.failed)} failed, {_number(lanes.restarts)} restarts"
    table.add_row("lanes", encoded)
    found = f"{_percent(cache.hit_rate)} of {_number(cache.hits + cache.misses)} look-ups hit"
    found += f", {_number(cache.evicted)} evicted"
    if cache.tiers:
        found += f"; encodings by place: {_listed(cache.tiers)}"
    table.add_row("encoder cache", found)
    return table


def _slo(frame: Frame) -> Table:
    table = plain_table(("class", "in SLO", "met", "missed", "TTFT P50", "TTFT P99", "ITL P99"), left=("class",))
    for name, one in frame.slo.items():
        if one.fraction is None and one.ttft_p50_seconds is None:
            continue
        table.add_row(
            name,
            _percent(one.fraction),
            _number(one.met),
            _number(one.missed),
            _seconds(one.ttft_p50_seconds),
            _seconds(one.ttft_p99_seconds),
            _seconds(one.itl_p99_seconds),
        )
    return table


def _decisions(found: tuple[HistoryLine, ...]) -> RenderableType:
    """Return the latest decisions as sentences that have the reason, the latest at the end; times are local."""
    if not found:
        return Text("The history has no decisions about requests yet.", "dim")
    table = plain_table(("time", "request", "latest decisions"), left=("time", "request", "latest decisions"))
    table.columns[1].overflow = table.columns[2].overflow = "fold"
    for one in found:
        time = datetime.fromtimestamp(one.at).astimezone().strftime("%H:%M:%S")
        table.add_row(time, Text(one.request_id or NOTHING), Text(sentence_of(one)))
    return table


def _stages(frame: Frame) -> Table:
    columns = ("stage", "replica", "running", "waiting", "limit", "finished", "failed", "latency P50", "restarts")
    table = plain_table(columns, left=("stage",))
    for one in frame.stages:
        table.add_row(
            one.stage,
            one.replica,
            *map(_number, (one.running, one.waiting, one.batch_limit, one.finished, one.failed)),
            _seconds(one.latency_p50_seconds),
            _number(one.restarts),
        )
    return table


def _listed(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{_number(count)} {name}" for name, count in counts.items()) or NOTHING


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{1e3 * value:.0f} ms" if value < 1 else f"{value:.1f} s"

"""The output of `decode`: facts on the video, its frames, and the time of each stage."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vllm_omni_sched.cli.console import section
from vllm_omni_sched.cli.decode.frame_choice import gop_starts
from vllm_omni_sched.video.frame_order import shown_frames
from vllm_omni_sched.video.results import STAGES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_omni_sched.video.results import DecodedVideo

_MAX_SHOWN = 12  # numbers in a row; all of them are in --json


def findings(decoded: DecodedVideo, elapsed_seconds: float) -> dict[str, Any]:
    """Return the findings for ``--json``."""
    index, report = decoded.index, decoded.report
    return {
        "codec": index.codec,
        "width": index.width,
        "height": index.height,
        "rotation": index.rotation,
        "pixel_format": index.pixel_format,
        "fps": index.fps,
        "duration_seconds": index.duration_seconds,
        "total_frames": shown_frames(index),
        "order": index.order.value,
        "why_sequence": index.why_sequence.value if index.why_sequence else None,
        "gop_starts": gop_starts(index),
        "notes": list(index.notes),
        "frames": [
            {"frame": n, "pts_seconds": round(seconds, 6)}
            for n, seconds in zip(decoded.indices, decoded.pts_seconds, strict=True)
        ],
        "shape": list(decoded.frames.shape),
        "elapsed_seconds": round(elapsed_seconds, 6),
        "stage_seconds": {stage: round(seconds, 6) for stage, seconds in report.seconds.items()},
        "pieces": report.pieces,
        "frames_decoded": report.decoded,
        "frames_used": report.used,
        "copied_bytes": report.copied_bytes,
        "fallbacks": list(report.fallbacks),
    }


def screen(name: str, decoded: DecodedVideo, elapsed_seconds: float) -> RenderableType:
    """Return one page: the video, its frames, and the time of each stage."""
    return Group(_video(name, decoded), _frames(decoded), _stages(decoded, elapsed_seconds))


def clock_time(seconds: float) -> str:
    """Return a time as ``1:02:03.456``; without hours if there are none."""
    thousandths = round(seconds * 1000)
    minutes, rest = divmod(thousandths, 60_000)
    text = f"{minutes % 60:02d}:{rest // 1000:02d}.{rest % 1000:03d}"
    return f"{minutes // 60}:{text}" if minutes >= 60 else text


def _section(title: str) -> Table:
    table = section(title)
    table.add_column("what", style="dim", min_width=10)
    table.add_column("value")
    return table


def _video(name: str, decoded: DecodedVideo) -> Table:
    index = decoded.index
    table = _section(name)
    turned = f", turned by {index.rotation}°" if index.rotation else ""
    table.add_row("  video", f"{index.codec}, {index.width}×{index.height} {index.pixel_format}{turned}")
    rate = f" at {index.fps:.3f} per second".replace(".000", "") if index.fps else ""
    length = f"{clock_time(index.duration_seconds)}, " if index.duration_seconds else ""
    table.add_row("  length", f"{length}{shown_frames(index):,} frames{rate}")
    starts = gop_starts(index)
    if starts:
        table.add_row("  starts", f"{len(starts)} places to begin: frames {_abbreviated_numbers(starts)}")
    else:
        why = index.why_sequence.value if index.why_sequence else "no start is known"
        table.add_row("  starts", f"decoded in sequence: {why}")
    for note in index.notes:
        table.add_row("  note", note)
    return table


def _frames(decoded: DecodedVideo) -> Table:
    table = _section("\nFrames")
    count = len(decoded.indices)
    table.add_row("  wanted", f"{count}: {_abbreviated_numbers(decoded.indices)}" if count else "none")
    if count:
        times = [clock_time(seconds) for seconds in decoded.pts_seconds]
        table.add_row("  shown at", _abbreviated(times))
    report = decoded.report
    total, pieces = shown_frames(decoded.index), "1 piece" if report.pieces == 1 else f"{report.pieces} pieces"
    share = f", {report.used / report.decoded:.0%} of them used" if report.decoded else ""
    table.add_row("  decoded", f"{report.decoded:,} of {total:,} frames{share}; {pieces}")
    if report.fallbacks:
        text = ", ".join(f"{kind} ×{report.fallbacks.count(kind)}" for kind in sorted(set(report.fallbacks)))
        table.add_row("  fallbacks", Text(text, "yellow"))
    return table


def _stages(decoded: DecodedVideo, elapsed_seconds: float) -> Table:
    table = section("\nTime")
    table.add_column("stage", style="dim", min_width=10)
    table.add_column("milliseconds", justify="right")
    table.add_column("bar")
    seconds = decoded.report.seconds
    longest = max([*seconds.values(), 1e-9])
    for stage in STAGES:
        bar = "█" * math.ceil(24 * seconds[stage] / longest) if seconds[stage] > 0 else ""
        note = "  sum over decoders" if stage in ("decode", "convert") else ""
        table.add_row(f"  {stage}", f"{seconds[stage] * 1e3:,.1f} ms", Text(bar, "cyan").append(note, "dim"))
    table.add_row("  in all", Text(f"{elapsed_seconds * 1e3:,.1f} ms", "bold"), "")
    return table


def _abbreviated_numbers(numbers: Sequence[int]) -> str:
    return _abbreviated([str(n) for n in numbers])


def _abbreviated(texts: Sequence[str]) -> str:
    if len(texts) <= _MAX_SHOWN:
        return ", ".join(texts)
    return f"{', '.join(texts[: _MAX_SHOWN - 2])}, … {texts[-1]}"

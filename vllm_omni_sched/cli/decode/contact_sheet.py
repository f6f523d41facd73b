"""Contact sheets: the sampled frames as one picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vllm_omni_sched.cli.decode.view import clock_time
from vllm_omni_sched.video.frame_order import shown_frames

if TYPE_CHECKING:
    from vllm_omni_sched.video.results import DecodedVideo

MAX_CELLS = 100
_PAPER, _INK, _FAINT = (24, 25, 28), (236, 236, 238), (150, 152, 160)
_WIDE, _MARGIN, _GAP, _LINE, _HEADER = 1600, 24, 14, 26, 64
_SCREEN = 1.6  # width by height
_CELL = 120  # at least, for a time and a number below it
_COLUMNS = (_WIDE - 2 * _MARGIN + _GAP) // (_CELL + _GAP)


class Layout(NamedTuple):
    """The grid of a contact sheet: numbers of columns and rows, and the size of a cell in pixels."""

    columns: int
    rows: int
    width: int
    height: int


def layout(count: int, width: int, height: int) -> Layout:
    """Return a grid about as wide as a screen, whose cells have the shape of the frames and are no larger.

    Args:
        count: number of frames; at least one.
        width, height: size of a frame, in pixels.
    """
    shape = height / width
    ideal = math.sqrt(count * shape * _SCREEN)

    def untidiness(columns: int) -> float:
        empty = -count % columns
        return abs(columns - ideal) / ideal + empty / columns / 4

    columns = min(range(1, min(count, _COLUMNS) + 1), key=untidiness)
    room = (_WIDE - 2 * _MARGIN - (columns - 1) * _GAP) // columns
    cell = max(_CELL, min(room, 2 * width, 480))
    return Layout(columns, math.ceil(count / columns), cell, max(1, round(cell * shape)))


def write_sheet(path: Path, name: str, decoded: DecodedVideo) -> None:
    """Write a contact sheet of at most `MAX_CELLS` frames, evenly chosen; the path's suffix gives the format.

    Raises:
        OSError, ValueError: the file cannot be written, or the format is not supported.
    """
    count = len(decoded.indices)
    chosen = range(count) if count <= MAX_CELLS else np.linspace(0, count - 1, MAX_CELLS, dtype=int).tolist()
    _, height, width, _ = decoded.frames.shape
    grid = layout(len(chosen), width, height)
    size = (
        max(2 * _MARGIN + grid.columns * (grid.width + _GAP) - _GAP, 520),
        _HEADER + _MARGIN + grid.rows * (grid.height + _LINE + _GAP) - _GAP + _MARGIN // 2,
    )
    sheet = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(sheet)
    _header(draw, size[0], name, decoded, len(chosen))
    small = ImageFont.load_default(15)
    for cell, n in enumerate(chosen):
        row, column = divmod(cell, grid.columns)
        x = _MARGIN + column * (grid.width + _GAP)
        y = _HEADER + _MARGIN // 2 + row * (grid.height + _LINE + _GAP)
        picture = Image.fromarray(decoded.frames[n])
        sheet.paste(picture.resize((grid.width, grid.height), Image.Resampling.LANCZOS), (x, y))
        below = y + grid.height + 5
        draw.text((x, below), clock_time(decoded.pts_seconds[n]), _INK, small)
        number = f"#{decoded.indices[n]}"
        draw.text((x + grid.width, below), number, _FAINT, small, anchor="ra")
    sheet.save(path)


def _header(draw: ImageDraw.ImageDraw, width: int, name: str, decoded: DecodedVideo, shown: int) -> None:
    index = decoded.index
    large, small = ImageFont.load_default(22), ImageFont.load_default(15)
    count = len(decoded.indices)
    parts = [
        index.codec,
        f"{index.width}x{index.height}",  # the font has no ×
        clock_time(index.duration_seconds) if index.duration_seconds else "",
        f"{count:,} of {shown_frames(index):,} frames",
        f"{shown} shown" if shown < count else "",
    ]
    draw.text((_MARGIN, 14), _cut(draw, name, large, width - 2 * _MARGIN), _INK, large)
    text = "  ·  ".join(filter(None, parts))
    draw.text((_MARGIN, 42), _cut(draw, text, small, width - 2 * _MARGIN), _FAINT, small)


def _cut(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, room: int) -> str:
    """Return as much of the text as fits into ``room`` pixels."""
    if draw.textlength(text, font) <= room:
        return text
    while text and draw.textlength(text + "…", font) > room:
        text = text[:-1]
    return text + "…"

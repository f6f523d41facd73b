"""``vllm-omni-sched decode``: decodes frames of a video as the server would, and reports the time of each stage."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn, TextColumn

from vllm_omni_sched.cli.console import PROBLEM, USAGE, leave, page_console, progress_bar
from vllm_omni_sched.clock import monotonic_seconds
from vllm_omni_sched.config.errors import VideoError
from vllm_omni_sched.config.extras import how_to_install

if TYPE_CHECKING:
    from vllm_omni_sched.cli.decode.frame_choice import FrameChoice
    from vllm_omni_sched.video.results import DecodedVideo

_FRAMES = 32

_leave = partial(leave, "decode")


def decode(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A video.", show_default=False)],
    frames: Annotated[
        int | None,
        typer.Option(min=1, help=f"Number of frames, evenly spaced; default: {_FRAMES}.", show_default=False),
    ] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second.", show_default=False)] = None,
    every: Annotated[bool, typer.Option("--all", help="Every frame.")] = False,
    decoders: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Decoder processes; default: one per processor.", show_default=False),
    ] = None,
    contact_sheet: Annotated[
        Path | None, typer.Option(metavar="PICTURE", help="Write the frames as one picture here.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Decode some frames of a video on all processors, and report the time of each stage.

    Exit status: 0 on success, 1 if the video cannot be decoded, 2 if an argument is invalid.
    """
    if sum((frames is not None, fps is not None, every)) > 1:
        _leave(USAGE, "give one of --frames, --fps and --all")
    if fps is not None and not 0 < fps < float("inf"):
        _leave(USAGE, f"--fps must be positive, got {fps:g}")
    _need("av", "PyAV")
    if contact_sheet is not None:
        _need("PIL", "Pillow")
    # imported late: these modules need numpy and the packages of the extra
    from vllm_omni_sched.cli.decode import frame_choice, view

    choose: FrameChoice = frame_choice.uniform(frames or _FRAMES)
    if every or fps is not None:
        choose = frame_choice.per_second(fps) if fps is not None else frame_choice.all_frames
    began = monotonic_seconds()
    decoded = _decoded(file, choose, decoders, quiet=as_json)
    elapsed = monotonic_seconds() - began
    if contact_sheet is not None:
        _write_sheet(contact_sheet, file.name, decoded)
    if as_json:
        typer.echo(json.dumps({"file": file.name, **view.findings(decoded, elapsed)}, indent=2))
        return
    console = page_console()
    console.print(view.screen(file.name, decoded, elapsed))
    if contact_sheet is not None:
        console.print(f"\n{contact_sheet}", soft_wrap=True)  # a path is copied from the screen


def _decoded(file: Path, choose: FrameChoice, decoders: int | None, quiet: bool) -> DecodedVideo:
    from vllm_omni_sched.video.options import VideoOptions
    from vllm_omni_sched.video.service import FlashCodec

    options = VideoOptions() if decoders is None else VideoOptions(decoders=decoders)
    try:
        data = file.read_bytes()
    except OSError as error:
        _leave(USAGE, f"{file}: {error.strerror or error}")
    codec = FlashCodec(options)
    try:
        with progress_bar(MofNCompleteColumn(), TextColumn("frames"), quiet=quiet) as bar:
            task = bar.add_task("Indexing", total=None)

            def progress(there: int, wanted: int) -> None:
                bar.update(task, description="Decoding", completed=there, total=wanted)

            return codec.load(data, choose, progress=progress)
    except VideoError as error:
        _leave(PROBLEM, f"{file}: {error}")
    finally:
        codec.close()


def _write_sheet(path: Path, name: str, decoded: DecodedVideo) -> None:
    from vllm_omni_sched.cli.decode.contact_sheet import write_sheet

    if not len(decoded.indices):
        _leave(PROBLEM, "there are no frames to put on a contact sheet")
    try:
        write_sheet(path, name, decoded)
    except (OSError, ValueError) as error:
        _leave(USAGE, f"--contact-sheet {path}: {getattr(error, 'strerror', None) or error}")


def _need(module: str, name: str) -> None:
    if find_spec(module) is None:
        _leave(USAGE, f"{name} is not installed: {how_to_install('video')}")

"""`vllm-omni-sched decode`: what it decodes, what it shows, and with which status it ends."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.support.nvcodec import indexed, plain, video
from vllm_omni_sched.cli import app
from vllm_omni_sched.cli.decode import contact_sheet, frame_choice
from vllm_omni_sched.cli.decode.view import clock_time, screen
from vllm_omni_sched.video.facts import Order, SequenceReason, VideoIndex
from vllm_omni_sched.video.results import DecodedVideo, Report

pytestmark = pytest.mark.once  # nothing here reaches vLLM


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.mkv"
    path.write_bytes(video(container="matroska", frames=64, options="bf=2 sc_threshold=0 flags=+cgop"))
    return path


def run(*arguments: Any) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["decode", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def index_of(**changes: Any) -> VideoIndex:
    return indexed(video(options="bf=2 sc_threshold=0"), **changes)[0]


def result(index: VideoIndex, numbers: Sequence[int], **report: Any) -> DecodedVideo:
    frames = np.full((len(numbers), 48, 64, 3), 90, np.uint8)
    seconds = {"index": 0.01, "wait": 0.002, "decode": 0.2, "convert": 0.03, "assemble": 0.0}
    told = Report(**{"seconds": seconds, "pieces": 3, "decoded": 40, "used": 8, "copied_bytes": 0, **report})
    return DecodedVideo(frames, list(numbers), [n / 30 for n in numbers], index, told)


def test_json_says_what_was_decoded_and_how(clip: Path) -> None:
    status, said, _ = run(clip, "--frames", 5, "--decoders", 1, "--json")
    found = json.loads(said)
    assert status == 0
    assert [frame["frame"] for frame in found["frames"]] == [0, 15, 31, 47, 63]
    assert found["frames"][1]["pts_seconds"] == pytest.approx(0.5, abs=1e-3)
    assert (found["codec"], found["width"], found["height"], found["total_frames"]) == ("h264", 64, 48, 64)
    assert found["gop_starts"] == [0, 16, 32, 48]
    assert found["shape"] == [5, 48, 64, 3]
    assert 5 <= found["frames_decoded"] <= 64
    assert found["frames_used"] == 5
    assert set(found["stage_seconds"]) == {"index", "wait", "decode", "convert", "assemble"}


def test_the_screen_names_the_video_its_frames_and_every_stage(clip: Path) -> None:
    status, said, progress = run(clip, "--fps", 2, "--decoders", 1)
    assert status == 0
    assert "h264, 64×48 yuv420p" in said
    assert "5: 0, 15, 30, 45, 60" in said
    assert "4 places to begin: frames 0, 16, 32, 48" in said
    for stage in ("index", "wait", "decode", "convert", "assemble", "in all"):
        assert f"  {stage} " in said
    assert progress == ""  # it is for terminals


def test_a_contact_sheet_shows_the_frames(clip: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    status, said, _ = run(clip, "--frames", 4, "--decoders", 1, "--contact-sheet", sheet)
    assert status == 0
    assert said.rstrip().endswith("sheet.png")
    whole = plain(clip.read_bytes())
    with Image.open(sheet) as opened:
        picture = np.asarray(opened.convert("RGB"))
    grid = contact_sheet.layout(4, 64, 48)
    first = np.asarray(Image.fromarray(whole[0]).resize((grid.width, grid.height), Image.Resampling.LANCZOS))
    y, x = 64 + 12, 24
    assert np.array_equal(picture[y : y + grid.height, x : x + grid.width], first)


@pytest.mark.parametrize(
    ("arguments", "content", "status", "says"),
    [
        (["--frames", "2", "--all"], b"", 2, "give one of --frames, --fps and --all"),
        (["--fps", "0"], b"", 2, "--fps must be positive, got 0"),
        ([], None, 2, "No such file or directory"),
        (["--decoders", "1"], b"", 1, "empty"),
        (["--decoders", "1"], b"no video " * 1000, 1, "the file is not a readable video"),
        (["--decoders", "1"], "audio", 1, "no video stream"),
    ],
    ids=["two rules", "no rate", "no file", "empty", "text", "audio"],
)
def test_what_goes_wrong_is_one_line(
    tmp_path: Path, arguments: list[str], content: bytes | str | None, status: int, says: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(audio_only() if isinstance(content, str) else content)
    ended, said, complaint = run(path, *arguments)
    assert (ended, said) == (status, "")
    assert complaint.startswith("vllm-omni-sched decode: ")
    assert says in complaint


def test_a_sheet_that_cannot_be_written_is_one_line(clip: Path, tmp_path: Path) -> None:
    for name in ("sheet.what", "none/sheet.png"):
        status, _, complaint = run(clip, "--frames", 1, "--decoders", 1, "--contact-sheet", tmp_path / name)
        assert status == 2
        assert "--contact-sheet" in complaint


@pytest.mark.parametrize(("module", "name"), [("av", "PyAV"), ("PIL", "Pillow")])
def test_what_is_not_installed_is_named(clip: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr("vllm_omni_sched.cli.decode.find_spec", lambda n: None if n == module else there(n))
    status, _, complaint = run(clip, "--contact-sheet", "sheet.png")
    assert status == 2
    assert complaint == f"vllm-omni-sched decode: {name} is not installed: pip install av pillow"


def test_rules_choose_frames_by_number_and_by_time() -> None:
    index = index_of()
    assert frame_choice.uniform(4)(index) == [0, 15, 31, 47]
    assert frame_choice.uniform(1)(index) == [0]
    assert frame_choice.uniform(100)(index) == list(range(48)) == frame_choice.all_frames(index)
    assert frame_choice.per_second(10)(index) == list(range(0, 48, 3))
    assert frame_choice.per_second(1000)(index) == list(range(47))  # its last tick comes before frame 47
    assert frame_choice.gop_starts(index) == [0, 16, 32]


def test_without_pts_times_are_those_of_the_mean_rate() -> None:
    index = index_of(order=Order.SEQUENCE, why_sequence=SequenceReason.NO_PTS, fps=24.0)
    assert frame_choice.frame_times(index)[24] == 1.0
    assert frame_choice.gop_starts(index) == []
    assert frame_choice.per_second(2)(index) == [0, 12, 24, 36]


def shown(decoded: DecodedVideo) -> str:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115 - ends with the console
    console.print(screen("clip.mp4", decoded, 0.25))
    console.file.close()
    return console.export_text()


def test_what_is_unusual_is_shown() -> None:
    index = index_of(order=Order.SEQUENCE, why_sequence=SequenceReason.NO_START, rotation=90, notes=("odd",))
    said = shown(result(index, [], fallbacks=("busy", "codec", "busy")))
    assert "turned by 90°" in said
    assert "decoded in sequence: no_start" in said
    assert "busy ×2, codec ×1" in said
    assert "wanted     none" in said
    assert "odd" in said


def test_long_lists_are_cut_short() -> None:
    said = shown(result(index_of(), list(range(40))))
    assert "40: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, … 39" in said
    assert "20% of them used; 3 pieces" in said


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "00:00.000"), (61.0334, "01:01.033"), (59.9996, "01:00.000"), (3661.5, "1:01:01.500")]
)
def test_times_read_like_a_clock(seconds: float, text: str) -> None:
    assert clock_time(seconds) == text


@pytest.mark.parametrize("count", [1, 2, 5, 8, 32, 100])
@pytest.mark.parametrize(("width", "height"), [(1280, 720), (720, 1280), (64, 48)])
def test_a_sheet_is_a_grid_without_empty_rows(count: int, width: int, height: int) -> None:
    grid = contact_sheet.layout(count, width, height)
    assert grid.columns * (grid.rows - 1) < count <= grid.columns * grid.rows
    assert grid.columns * grid.width <= 1600
    assert grid.height / grid.width == pytest.approx(height / width, rel=0.02)


def test_rows_are_full_where_that_is_near() -> None:
    assert contact_sheet.layout(16, 960, 400)[:2] == (4, 4)
    assert contact_sheet.layout(32, 1280, 720)[:2] == (5, 7)
    assert contact_sheet.layout(7, 48, 96)[:2] == (5, 2)


def test_a_sheet_of_many_frames_shows_some_and_says_so(tmp_path: Path) -> None:
    sheet = tmp_path / "sheet.png"
    contact_sheet.write_sheet(sheet, "a name " * 60, result(index_of(), list(range(120))))
    grid = contact_sheet.layout(contact_sheet.MAX_CELLS, 64, 48)
    with Image.open(sheet) as picture:
        assert picture.width <= 1600
        assert picture.height >= grid.rows * grid.height


def audio_only() -> bytes:
    import io

    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        track = out.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 8000
        out.mux(track.encode(frame))
        out.mux(track.encode())
    return file.getvalue()

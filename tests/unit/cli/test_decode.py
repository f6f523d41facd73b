"""`vllm-omni-sched decode`: what it decodes, what it shows, and with which status it ends."""

from __future__ import annotations

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
from vllm_omni_sched.video.facts import VideoIndex
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


def test_rules_choose_frames_by_number_and_by_time() -> None:
    index = index_of()
    assert frame_choice.uniform(4)(index) == [0, 15, 31, 47]
    assert frame_choice.uniform(1)(index) == [0]
    assert frame_choice.uniform(100)(index) == list(range(48)) == frame_choice.all_frames(index)
    assert frame_choice.per_second(10)(index) == list(range(0, 48, 3))
    assert frame_choice.per_second(1000)(index) == list(range(47))  # its last tick comes before frame 47
    assert frame_choice.gop_starts(index) == [0, 16, 32]


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

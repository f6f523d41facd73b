"""What `benchmarks.video` and `benchmarks.video_server` make of what they were told, and the clips they make."""

import io
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import av
import pytest
from rich.console import Console

from benchmarks.harness.priority import kept_priority
from benchmarks.video import FFMPEG, OURS, STOCK, __main__, clips
from benchmarks.video_server import __main__ as server


class Peer:
    """Takes ten seconds for its first load, and then so many; what it loads is told by its digest."""

    def __init__(self, seconds, digest=1):
        self.seconds, self.digest, self.asked = seconds, digest, []

    def ask(self, **request):
        self.asked.append(request)
        return {
            "seconds": 10.0 if len(self.asked) == 1 else self.seconds,
            "cpu_seconds": 1.0,
            "frames": 32,
            "nbytes": 1000,
            "digest": [[self.digest, 0]],
            "peak_bytes": 1150 if request.get("memory") else 0,
        }


@pytest.mark.parametrize("raised", [None, ValueError])
def test_an_encoder_may_not_keep_the_processors_for_itself(raised):
    """As root, SVT-AV1 puts who opens it into a real-time class: all tests after one of AV1 starved the machine."""
    before = os.sched_getscheduler(0)
    with suppress(ValueError), kept_priority():
        with av.open(io.BytesIO(), "w", format="mp4") as file:
            stream = file.add_stream("libsvtav1", rate=30, options={"preset": "12"})
            stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
            file.mux(stream.encode(av.VideoFrame(64, 64, "yuv420p")))
            file.mux(stream.encode())
        if raised:
            raise raised
    assert os.sched_getscheduler(0) == before


def samples(monkeypatch, task="32 frames", **digests):
    monkeypatch.setattr(__main__, "encoded", lambda clip: clip.path)
    sides = {
        variant: Peer(seconds, digests.get(variant, 1))
        for variant, seconds in ((STOCK, 4.0), (FFMPEG, 3.0), (OURS, 1.0))
    }
    found = __main__.one_task(sides, task, "h264-gop60", 3, random.Random(0))
    return sides, {(task, "h264-gop60", variant): rounds for variant, rounds in found.items()}


def test_memory_is_looked_at_apart_from_time_in_the_load_that_warms_up(monkeypatch):
    sides, found = samples(monkeypatch)
    for peer in sides.values():
        assert [bool(request.get("memory")) for request in peer.asked] == [True, False, False, False]
    assert all(one["seconds"] < 10 for rounds in found.values() for one in rounds)


def test_ratios_are_of_the_same_round(monkeypatch):
    records = {entry["variant"]: entry for entry in __main__.record(samples(monkeypatch)[1])}
    assert (records[OURS]["stock_over_it"], records[OURS]["ffmpeg_over_it"]) == (4.0, 3.0)
    assert records[OURS]["peak_over_output"] == 1.15
    assert "stock_over_it" not in records[STOCK]
    console = Console(file=io.StringIO(), width=160)
    console.print(__main__.table(list(records.values())))
    assert "4.00" in console.file.getvalue()


def test_other_frames_than_stocks_are_told(monkeypatch):
    records = {entry["variant"]: entry for entry in __main__.record(samples(monkeypatch, ours=2)[1])}
    assert [records[variant]["same_frames_as_stock"] for variant in (STOCK, FFMPEG, OURS)] == [True, True, False]


def test_sixteen_requests_load_the_short_clips_in_turns():
    (name,) = __main__.clips_of("16 requests", ["h264-gop60"])
    files = __main__.files_of(__main__.TASKS["16 requests"], name)
    assert len(files) == 16
    assert {clip.name for clip in files} == {clip.name for clip in clips.SHORT}


def test_a_clip_is_made_once_and_has_the_key_frames_it_should(monkeypatch, tmp_path):
    av = pytest.importorskip("av")
    monkeypatch.setattr(clips, "CACHE", tmp_path)
    clip = clips.Clip("tiny", seconds=2, width=64, height=48, gop=15)
    path = clips.encoded(clip)
    written = path.stat().st_mtime_ns
    assert clips.encoded(clip).stat().st_mtime_ns == written
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.mp4"]
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
    assert (len(packets), sum(packet.is_keyframe for packet in packets)) == (60, 4)


# A process of its own: a child of another test that ends meanwhile would take memory away.
HOLDS_256_MIB = """
import time
import numpy as np
from benchmarks.video import memory
with memory.Peak() as watch:
    before = watch.peak_bytes
    held = np.ones(256 << 20, np.uint8)
    until = time.monotonic() + 10
    while watch.peak_bytes - before < 256 << 20 and time.monotonic() < until:
        time.sleep(memory.INTERVAL)
    del held
print(watch.peak_bytes - before)
"""


def test_the_most_memory_of_a_block_is_seen():
    root = Path(__file__).parents[2]
    told = subprocess.run([sys.executable, "-c", HOLDS_256_MIB], cwd=root, check=True, capture_output=True, text=True)
    assert 256 << 20 <= int(told.stdout) <= 272 << 20


def test_server_rounds_are_compared_with_stocks_of_the_same_round():
    def one(p99, answer="a"):
        return {"TTFT P50": 1.0, "TTFT P99": p99, "seconds": 2.0, "answers": [answer]}

    records = server.record({"stock": [one(4.0), one(6.0)], "ours": [one(2.0), one(2.0)]}, server.MEASURES)
    found = {(entry["variant"], entry["measure"]): entry for entry in records}
    assert found["ours", "TTFT P99"]["of_stock"] == pytest.approx((0.5 + 1 / 3) / 2, abs=1e-3)
    assert all(entry["same_answers"] for entry in records)
    differs = server.record({"stock": [one(4.0)], "ours": [one(2.0, "b")]}, server.MEASURES)
    assert {entry["variant"]: entry["same_answers"] for entry in differs} == {"stock": True, "ours": False}

"""Sampling of streams, files that grow, and what a stream's process may not do."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.live import GOP, plain, stream
from tests.support.stopping import stop
from vllm_omni_sched.config.errors import ConfigError, VideoDeadlineError, VideoInputError
from vllm_omni_sched.video.live import LiveVideo, Sampling
from vllm_omni_sched.video.live.follow import follow
from vllm_omni_sched.video.live.sampling import Sampler


@pytest.mark.parametrize(
    ("sampling", "times", "wanted"),
    [
        (Sampling(), [0, 1, 2], [0, 1, 2]),
        (Sampling(every=3), range(7), [0, 3, 6]),
        (Sampling(fps=1), [0, 0.5, 0.99, 1.0, 1.5, 2.2, 2.9, 3.0], [0, 3, 5, 7]),
        (Sampling(fps=2), [0, 0.1, 4.0, 4.1, 4.6], [0, 2, 4]),  # a gap is not made up for
        (Sampling(fps=30), [0, 0.0333, 0.0667, 0.1], [0, 2, 3]),  # times are taken as they are
        (Sampling(fps=100), [0, 0.04, 0.08], [0, 1, 2]),  # never twice the same
    ],
)
def test_the_rule_says_which_frames_are_wanted(sampling: Sampling, times: Any, wanted: list[int]) -> None:
    sampler = Sampler(sampling)
    assert [n for n, seconds in enumerate(times) if sampler.wants(n, seconds)] == wanted


@pytest.mark.parametrize("options", [{"every": 0}, {"fps": 0.0}, {"fps": float("nan")}, {"every": 2, "fps": 1.0}])
def test_rules_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="sampling: "):
        Sampling(**options)


class Writer:
    """Adds to a file whenever its reader sleeps; time is what it has slept."""

    def __init__(self, path: Path, data: bytes, step: int) -> None:
        self._path, self._parts = path, [data[at : at + step] for at in range(0, len(data), step)]
        self.now = 0.0
        path.write_bytes(b"")

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self._parts:
            with self._path.open("ab") as file:
                file.write(self._parts.pop(0))

    def is_complete(self) -> bool:
        return not self._parts


@pytest.mark.parametrize("by", ["idle", "complete"])
def test_a_file_is_followed_while_it_grows(tmp_path: Path, by: str) -> None:
    data = stream("matroska").data
    writer = Writer(tmp_path / "growing.mkv", data, 3000)
    ending = {"is_complete": writer.is_complete} if by == "complete" else {}
    with LiveVideo(slots=80, silence_seconds=60.0) as live:
        clock = itertools.count().__next__ if by == "complete" else lambda: writer.now
        idle = 1e9 if by == "complete" else 1.0
        frames = list(
            follow(tmp_path / "growing.mkv", live, idle_seconds=idle, clock=clock, sleep=writer.sleep, **ending)
        )
        assert len(frames) == 4 * GOP
        assert np.array_equal([frame.pixels for frame in frames], plain(data))


def test_a_file_is_not_followed_by_a_process_that_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "file.ts").write_bytes(stream("mpegts", gops=8, width=320).data * 8)
    with LiveVideo(slots=2, silence_seconds=0.5) as live:
        stop(live.pid)
        with pytest.raises(VideoDeadlineError, match="silence_seconds"):
            list(follow(tmp_path / "file.ts", live))


def test_a_file_that_is_not_there_cannot_be_followed(tmp_path: Path) -> None:
    with LiveVideo() as live, pytest.raises(VideoInputError, match="No such file"):
        list(follow(tmp_path / "none.ts", live))

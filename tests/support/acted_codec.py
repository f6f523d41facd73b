"""Make a codec with the decoders of `tests.support.video_actors`, an observer, and checks of its results."""

from __future__ import annotations

from tests.support import video_actors as actors
from vllm_omni_sched.config.errors import VideoError
from vllm_omni_sched.video.facts import VideoIndex
from vllm_omni_sched.video.options import VideoOptions
from vllm_omni_sched.video.pool.kinds import DecoderKind
from vllm_omni_sched.video.results import DecodedVideo, Report
from vllm_omni_sched.video.service import FlashCodec


class Watching:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.most_busy = 0
        self.restarts = 0
        self.reports: list[Report] = []
        self.errors: list[VideoError] = []

    def busy(self, decoders: int, of: int) -> None:
        assert decoders <= of
        self.most_busy = max(self.most_busy, decoders)

    def loaded(self, report: Report) -> None:
        self.reports.append(report)

    def failed(self, error: VideoError) -> None:
        self.errors.append(error)

    def restarted(self, kind: str) -> None:
        self.restarts += 1


def service(*kinds: DecoderKind, observer: Watching | None = None, **options: object) -> FlashCodec:
    return FlashCodec(
        VideoOptions(**options),  # type: ignore[arg-type]
        kinds=kinds or (actors.kind(),),
        read_index=actors.READ_INDEX,
        observer=observer,
    )


def everything(index: VideoIndex) -> range:
    return range(len(index.packets))


def check(decoded: DecodedVideo, wanted: list[int]) -> None:
    assert decoded.indices == wanted
    assert decoded.frames.shape == (len(wanted), actors.HEIGHT, actors.WIDTH, 3)
    for frame, array in zip(wanted, decoded.frames, strict=True):
        assert (array == actors.expected(frame)).all()
    assert decoded.pts_seconds == [frame / 10 for frame in wanted]

"""Limits on one video. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_omni_sched.errors import VideoLimitError

if TYPE_CHECKING:
    from vllm_omni_sched.video.facts import VideoIndex


@dataclass(frozen=True)
class Limits:
    """The limits of the options of the same names."""

    max_input_bytes: int
    max_pixels: int
    max_frames: int
    max_duration_seconds: float
    max_output_bytes: int

    def check_input(self, nbytes: int) -> None:
        """Check the size of a file.

        Raises:
            VideoLimitError: a file of ``nbytes`` is too large.
        """
        _check("max_input_bytes", "the video has", nbytes, self.max_input_bytes, "bytes")

    def check_frames(self, frames: int) -> None:
        """Check the number of a video's frames.

        Raises:
            VideoLimitError: the video has more frames than allowed.
        """
        _check("max_frames", "the video has", frames, self.max_frames, "frames")

    def check_size(self, width: int, height: int) -> None:
        """Check the size of a video's frames.

        Raises:
            VideoLimitError: its frames are larger than allowed.
        """
        _check("max_pixels", "a frame has", width * height, self.max_pixels, f"pixels ({width}x{height})")

    def check_duration(self, seconds: float) -> None:
        """Check the duration of a video.

        Raises:
            VideoLimitError: it is longer than allowed.
        """
        _check("max_duration_seconds", "the video has", seconds, self.max_duration_seconds, "seconds")

    def check_output(self, nbytes: int) -> None:
        """Check the size of the wanted frames.

        Raises:
            VideoLimitError: they need more memory than all frames may use.
        """
        _check("max_output_bytes", "the wanted frames have", nbytes, self.max_output_bytes, "bytes")

    def check_index(self, index: VideoIndex) -> None:
        """Check all limits that can be checked before the wanted frames are known.

        Raises:
            VideoLimitError: the video exceeds a limit, which the message names.
        """
        self.check_size(index.width, index.height)
        self.check_frames(max(index.header_frames, len(index.packets)))
        self.check_duration(index.duration_seconds)


def _check(option: str, subject: str, found: float, allowed: float, unit: str) -> None:
    if found > allowed:
        raise VideoLimitError(
            f"{subject} {found:.10g} {unit}, but option {option!r} allows {allowed:.10g}; send a smaller video or "
            "raise the option"
        )

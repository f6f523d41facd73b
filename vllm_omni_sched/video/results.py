"""The result of loading a video, and the interface to observe loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from vllm_omni_sched.config.errors import VideoError
    from vllm_omni_sched.video.facts import VideoIndex

STAGES = ("index", "wait", "decode", "convert", "assemble")
"""The stages of a load, in their order."""


@dataclass(frozen=True)
class Report:
    """The time of each stage of a load, and its irregularities.

    Attributes:
        seconds: time by stage, see `STAGES`. Decode and convert are sums over decoders.
        pieces: number of pieces into which the video was cut.
        decoded: number of frames that decoders produced.
        used: number of wanted frames that were decoded.
        copied_bytes: copies of input and output, beyond the single write of each frame.
        fallbacks: reasons for fallbacks, values of closed enums, each as often as it occurred.
    """

    seconds: dict[str, float]
    pieces: int
    decoded: int
    used: int
    copied_bytes: int
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class DecodedVideo:
    """The frames of a video.

    Attributes:
        frames: uint8 of shape (frames, height, width, 3), RGB, in display order: the wanted frames that are sound.
            The array is in shared memory, which is freed with it; a tensor, if they stayed on a device.
        indices: numbers of the frames in display order.
        pts_seconds: when each frame is shown, in seconds from the first frame; from its number and the mean rate if
            the video has no pts.
        index: the index of the video.
    """

    frames: npt.NDArray[np.uint8] | torch.Tensor
    indices: list[int]
    pts_seconds: list[float]
    index: VideoIndex
    report: Report = field(repr=False)


class Observer:
    """Receives the events of decoding; this one ignores them. Called from several threads, must not block."""

    def busy(self, decoders: int, of: int) -> None:
        """Note the number of decoders that work now, and of all that run."""

    def loaded(self, report: Report) -> None:
        """Record that a video was decoded."""

    def failed(self, error: VideoError) -> None:
        """Record that a video could not be decoded."""

    def restarted(self, kind: str) -> None:
        """Record that a decoder process of this kind has ended, and will be replaced."""

"""The interface of decoders, and their joint result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from vllm_omni_sched.video.facts import Piece, PieceResult, VideoIndex


class Decoder(ABC):
    """Decodes pieces of one video after the other, one piece at a time; used by one thread.

    Implementations: PyAV (`vllm_omni_sched.video.pyav`), inside a worker process or not; NVDEC.
    """

    @abstractmethod
    def open(self, index: VideoIndex, packets: memoryview, frames: memoryview) -> None:
        """Open a video; the previous one is closed.

        Args:
            index: of the video.
            packets: the bytes to which offsets in ``index.packets`` refer.
            frames: the output, slots of ``height * width * 3`` bytes each, RGB, rows from the top,
                of the size after rotation.

        Raises:
            DecoderError: this decoder cannot decode such a video; another decoder may.
        """

    @abstractmethod
    def decode(self, piece: Piece) -> PieceResult:
        """Decode a piece. Frames that cannot be decoded are missing from the result's ``found``, which is no error."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; idempotent."""


@dataclass(frozen=True)
class Report:
    """The time of each stage of a load, and its irregularities.

    Attributes:
        seconds: time by stage: index, wait, decode, convert, assemble. Decode and convert are sums over decoders.
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
class Decoded:
    """The frames of a video.

    Attributes:
        frames: uint8 of shape (frames, height, width, 3), RGB, in display order: the wanted frames that are sound.
            The array is in shared memory, which is freed with it.
        indices: numbers of the frames in display order.
        pts_seconds: when each frame is shown, in seconds from the first frame; from its number and the mean rate if
            the video has no pts.
        index: the index of the video.
    """

    frames: npt.NDArray[np.uint8]
    indices: list[int]
    pts_seconds: list[float]
    index: VideoIndex
    report: Report = field(repr=False)

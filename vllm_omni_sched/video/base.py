"""The interface of decoders, and what comes out of all of them together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from vllm_omni_sched.video.facts import Piece, PieceResult, VideoIndex


class Decoder(ABC):
    """Decodes pieces, one at a time, of one video after the other. Used by one thread.

    Implementations: PyAV (`vllm_omni_sched.video.pyav`), inside a worker process or not; NVDEC.
    """

    @abstractmethod
    def open(self, index: VideoIndex, packets: memoryview, frames: memoryview) -> None:
        """Begin with a video; the one before is forgotten.

        Args:
            index: of the video.
            packets: the bytes that offsets in ``index.packets`` count from.
            frames: the output, slots of ``height * width * 3`` bytes each, RGB, rows from the top,
                of the size after rotation.

        Raises:
            DecoderError: this decoder cannot decode such a video; another may.
        """

    @abstractmethod
    def decode(self, piece: Piece) -> PieceResult:
        """Decode a piece; frames that cannot be had are missing from the result's ``found``, which is no error."""

    @abstractmethod
    def close(self) -> None:
        """Give back whatever it holds; may be called twice."""


@dataclass(frozen=True)
class Report:
    """Where the time went, and what was unusual.

    Attributes:
        seconds: by stage: index, wait, decode, convert, assemble. Decode and convert are sums over decoders.
        pieces: how many the video was cut into.
        decoded: frames that came out of decoders.
        used: frames that were wanted, and are there.
        copied_bytes: of input and output, beyond the one write of each frame.
        fallbacks: reasons, values of closed enums, each as often as it occurred.
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
        frames: uint8 of shape (frames, height, width, 3), RGB, in display order: those of the wanted frames that
            are sound. It lies in shared memory, which is given back when the array goes.
        indices: their numbers in display order.
        pts_seconds: when each is shown, in seconds from the first frame; by its number and the mean rate where the
            video has no pts.
        index: the video's.
    """

    frames: npt.NDArray[np.uint8]
    indices: list[int]
    pts_seconds: list[float]
    index: VideoIndex
    report: Report = field(repr=False)

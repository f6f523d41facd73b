"""The interface of decoders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from vllm_omni_sched.config.errors import DecoderError

if TYPE_CHECKING:
    from vllm_omni_sched.video.facts import DeviceRange, Piece, PieceResult, VideoIndex


class Decoder(ABC):
    """Decodes pieces of one video after the other, one piece at a time; used by one thread.

    Implementations: PyAV (`vllm_omni_sched.video.decoders.pyav`), inside a decoder process or not; NVDEC.
    """

    @abstractmethod
    def open(self, index: VideoIndex, packets: memoryview, frames: memoryview | DeviceRange) -> None:
        """Open a video; the previous one is closed.

        Args:
            index: of the video.
            packets: the bytes to which offsets in ``index.packets`` refer.
            frames: the output, slots of ``height * width * 3`` bytes each, RGB, rows from the top,
                of the size after rotation; a range, if it is in the memory that `map_device_frames` has mapped.

        Raises:
            DecoderError: this decoder cannot decode such a video; another decoder may.
        """

    def map_device_frames(self, shared: bytes) -> float:
        """Map the memory of frames on a device, before the process enters its sandbox.

        Args:
            shared: `DeviceFrames.shared` of the process that has it.

        Returns:
            The measured speed of copies into it from this decoder's device, in bytes per second.

        Raises:
            DecoderError: this kind of decoder does not decode on a device.
            RuntimeError, OSError, ValueError: the driver refuses.
        """
        raise DecoderError("this kind of decoder does not decode on a device")

    @abstractmethod
    def decode(self, piece: Piece) -> PieceResult:
        """Decode a piece. Frames that cannot be decoded are missing from the result's ``found``, which is no error."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; idempotent."""

"""Options of collaborative decoding, with their defaults, bounds and meaning, and the limits on one video."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from vllm_omni_sched.config.errors import VideoLimitError
from vllm_omni_sched.config.options import Toggle
from vllm_omni_sched.config.units import Bytes
from vllm_omni_sched.config.validators import whole_as_float

if TYPE_CHECKING:
    from vllm_omni_sched.video.facts import VideoIndex

MIB, GIB = 1 << 20, 1 << 30


class VideoOptions(BaseModel):
    """All options of video decoding. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    decoders: Literal["auto"] | int = Field(
        "auto", description="Number of decoder processes on CPUs; 'auto': one for each processor of this process."
    )
    nice: int = Field(0, ge=0, le=19, description="Niceness of decoder processes, added to that of the server.")
    worker_memory_bytes: Bytes = Field(
        4 * GIB, ge=128 * MIB, description="Private memory of one decoder process; a video that needs more is refused."
    )
    deadline_seconds: float = Field(
        60.0,
        gt=0.0,
        le=86_400.0,
        description="Time after which a video that is not decoded fails with an error, in seconds.",
    )
    max_input_bytes: Bytes = Field(2 * GIB, ge=1, description="Largest size of a video file, in bytes.")
    max_pixels: int = Field(
        36_000_000, ge=1, description="Largest width × height of a frame, in pixels; the default allows 8K."
    )
    max_frames: int = Field(500_000, ge=1, description="Most frames in a video, wanted or not.")
    max_duration_seconds: float = Field(4 * 3600.0, gt=0.0, description="Longest duration of a video, in seconds.")
    max_output_bytes: Bytes = Field(
        16 * GIB,
        ge=MIB,
        description="Memory for decoded frames of all videos in flight, in bytes; further videos wait for room.",
    )
    nvdec: Toggle = Field(
        Toggle.OFF,
        description="Decode on GPUs: 'auto' if possible, 'on' or refuse to start, 'off' never. Not measured yet.",
    )
    nvdec_engines: Literal["auto"] | int = Field(
        "auto", description="Number of decoding engines to use of each GPU; 'auto': all."
    )

    device_bytes: Bytes = Field(
        0,
        ge=0,
        description="Memory of the GPU that preprocesses for decoded frames, in bytes: frames stay there, and further "
        "videos wait for room; 0: frames are copied to the host.",
    )

    @property
    def limits(self) -> Limits:
        """Return the limits on one video."""
        return Limits(
            self.max_input_bytes,
            self.max_pixels,
            self.max_frames,
            self.max_duration_seconds,
            self.max_output_bytes,
        )

    @field_validator("decoders", "nvdec_engines")
    @classmethod
    def _count(cls, value: str | int) -> str | int:
        if isinstance(value, int) and not 1 <= value <= 1024:
            raise ValueError("must be 'auto' or a number from 1 to 1024")
        return value

    @model_validator(mode="after")
    def _device_needs_nvdec(self) -> VideoOptions:
        if self.device_bytes and self.nvdec is Toggle.OFF:
            raise ValueError(
                "'device_bytes' is given, but 'nvdec' is off, so that no frames are made on a GPU: set 'nvdec' to "
                "'auto' or 'on', or leave out 'device_bytes'"
            )
        return self

    @field_validator("nvdec", mode="before")
    @classmethod
    def _toggle(cls, value: Any) -> Any:
        # YAML 1.1 reads bare on/off as booleans.
        if isinstance(value, bool):
            return Toggle.ON if value else Toggle.OFF
        return Toggle(value) if isinstance(value, str) and value in {t.value for t in Toggle} else value

    @field_validator("deadline_seconds", "max_duration_seconds", mode="before")
    @classmethod
    def _seconds(cls, value: Any) -> Any:
        return whole_as_float(value)


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

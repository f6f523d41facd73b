"""Between a rule's frame numbers and decoded frames."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.errors import VideoInputError

if TYPE_CHECKING:
    from vllm_omni_sched.video.base import Decoded


def wanted_of(frames: Sequence[int]) -> list[int]:
    """The frames to decode: each once, in display order, as vLLM's loader reads them.

    Raises:
        VideoInputError: the rule wants none.
    """
    wanted = sorted({int(frame) for frame in frames if frame >= 0})
    if not wanted:
        raise VideoInputError("the sampling rule finds no frame in this video: is it empty?")
    return wanted


def sound(decoded: Decoded) -> Any:
    """The frames.

    Raises:
        VideoInputError: there are none.
    """
    if not len(decoded.indices):
        raise VideoInputError("none of the sampled frames can be decoded: the video is damaged, or cut off")
    return decoded.frames

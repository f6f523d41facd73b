"""Conversion of a rule's frame numbers into the frames to decode."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_omni_sched.errors import VideoInputError


def wanted_of(frames: Sequence[int]) -> list[int]:
    """Return the frames to decode: each once, in display order, as vLLM's loader reads them.

    Raises:
        VideoInputError: the rule wants none.
    """
    wanted = sorted({int(frame) for frame in frames if frame >= 0})
    if not wanted:
        raise VideoInputError("the sampling rule finds no frame in this video: is it empty?")
    return wanted

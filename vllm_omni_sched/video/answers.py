"""Interpretation of the answers of decoder processes."""

from __future__ import annotations

from vllm_omni_sched.errors import DecoderError, VideoError, VideoInputError, VideoLimitError
from vllm_omni_sched.video.facts import VideoIndex
from vllm_omni_sched.video.messages import Failed, Failure


def error_of(failed: Failed) -> VideoError:
    """Return the exception to raise for a failed task."""
    if failed.failure is Failure.LIMIT:
        return VideoLimitError(failed.message)
    if failed.failure is Failure.INPUT:
        return VideoInputError(failed.message)
    if failed.failure is Failure.MEMORY:
        return VideoLimitError(
            "the video needs more memory than a decoder may have; send a smaller one, or raise option "
            "'worker_memory_bytes'"
        )
    if failed.failure is Failure.DECODER:
        return DecoderError(failed.message)
    return DecoderError(f"the decoder failed with an internal error, the video may be sound: {failed.message}")


def check_sound(index: VideoIndex, nbytes: int) -> None:
    """Check an index, because it comes from a process that has read untrusted bytes.

    Raises:
        ValueError: the index is inconsistent.
    """
    packets = index.packets
    ends = packets["offset"] + packets["nbytes"]
    inside = len(packets) == 0 or (
        packets["offset"].min() >= 0 and packets["nbytes"].min() >= 0 and ends.min() >= 0 and ends.max() <= nbytes
    )
    if not inside or index.width <= 0 or index.height <= 0 or min(index.time_base) <= 0 or index.rotation % 90:
        raise ValueError("index")

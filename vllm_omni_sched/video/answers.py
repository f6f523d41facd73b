"""What to make of what decoder processes say."""

from __future__ import annotations

from vllm_omni_sched.errors import DecoderError, VideoError, VideoInputError, VideoLimitError
from vllm_omni_sched.video.facts import VideoIndex
from vllm_omni_sched.video.messages import Failed, Failure


def error_of(failed: Failed) -> VideoError:
    """What to raise."""
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
    return DecoderError(f"the decoder itself went wrong, which need not be the video's fault: {failed.message}")


def check_sound(index: VideoIndex, nbytes: int) -> None:
    """An index comes out of a process that has read hostile bytes.

    Raises:
        ValueError: no video has such an index.
    """
    packets = index.packets
    ends = packets["offset"] + packets["nbytes"]
    inside = len(packets) == 0 or (
        packets["offset"].min() >= 0 and packets["nbytes"].min() >= 0 and ends.min() >= 0 and ends.max() <= nbytes
    )
    if not inside or index.width <= 0 or index.height <= 0 or min(index.time_base) <= 0 or index.rotation % 90:
        raise ValueError("index")

"""Plan which frames of a clip are decoded, and in which pieces, as `vllm_omni_sched.video.plan` does for a file."""

from vllm_omni_sched.sim.costs.base import DecoderCosts
from vllm_omni_sched.sim.work import Clip

PIECES_PER_DECODER = 6
TIMES_ITS_OVERHEAD = 20
"""Both as in `vllm_omni_sched.video.plan`; a test checks that the pieces are the same."""


def frames_of(clip: Clip) -> int:
    """Return the number of all frames, 1 or more."""
    return max(1, round(clip.seconds * clip.fps))


def wanted_of(clip: Clip) -> list[int]:
    """Return the numbers of the wanted frames, evenly spaced from the first to the last, each once."""
    frames = frames_of(clip)
    count = min(clip.wanted, frames)
    if count < 2:
        return [0] * count
    step = (frames - 1) / (count - 1)
    return [int(step * number) for number in range(count)]


def spans_of(clip: Clip) -> list[tuple[int, int]]:
    """Return the first and last frame of each group of pictures (GOP) with a wanted frame, up to the last of these."""
    spans: list[tuple[int, int]] = []
    for number in wanted_of(clip):
        first = number - number % clip.gop_frames
        if spans and spans[-1][0] == first:
            spans[-1] = first, number
        else:
            spans.append((first, number))
    return spans


def pieces_of(clip: Clip, costs: DecoderCosts, decoders: int) -> list[float]:
    """Return the seconds of one decoder for each piece of a clip, longest first.

    1. Each GOP with wanted frames is a piece, from its key frame to the last wanted frame.
    2. Adjacent pieces are joined, up to a decoder's share of the whole.
    """
    spans = spans_of(clip)
    begin = costs.piece_seconds
    each = [begin + costs.frames_seconds(clip, last - first + 1) for first, last in spans]
    share = min(sum(each) / (decoders * PIECES_PER_DECODER), TIMES_ITS_OVERHEAD * begin)
    joined: list[tuple[int, int]] = []
    spent = 0.0
    for (first, last), cost in zip(spans, each, strict=True):
        if joined and first <= joined[-1][1] + 1 and spent + cost <= share:
            joined[-1] = joined[-1][0], last
            spent += cost
        else:
            joined.append((first, last))
            spent = cost
    return sorted((begin + costs.frames_seconds(clip, last - first + 1) for first, last in joined), reverse=True)


def sought_seconds(clip: Clip, costs: DecoderCosts) -> float:
    """Return seconds of one decoder that seeks to the key frame before each wanted frame, and decodes from there."""
    return sum(costs.piece_seconds + costs.frames_seconds(clip, last - first + 1) for first, last in spans_of(clip))


def whole_seconds(clip: Clip, costs: DecoderCosts) -> float:
    """Return the seconds of one decoder that decodes the whole file, whatever is wanted.

    OpenCV's loop does that: it grabs every frame.
    """
    return costs.piece_seconds + costs.frames_seconds(clip, frames_of(clip))

"""Compute a model's largest item as vLLM does at start: it sizes the encoder cache and the encoder's budget.

Each rule is the model's ``ProcessingInfo`` in vLLM 0.30 to 0.33 with one item of each modality: embeddings of the
largest item, for a ``max_model_len``. They follow the processor's limits, not the items of a workload.
"""

from collections.abc import Callable

LargestItem = Callable[[int], int]
"""Function from ``max_model_len`` to the embeddings of the largest item."""

_QWEN_PIXELS = 12_845_056
"""``max_pixels`` in preprocessor_config.json of Qwen2.5-VL; vLLM uses it for the frames of a video as well."""
_QWEN_FRAMES = 14
"""``_MAX_FRAMES_PER_VIDEO`` of qwen2_vl.py in vLLM."""


def qwen25_vl(max_model_len: int) -> int:
    """Return the embeddings of a video of 14 frames of ``max_pixels``, or of as many as the context holds.

    Two frames share embeddings. An image has as many as two frames.
    """
    frame_pair = _QWEN_PIXELS // 28**2
    pairs = max(min(max_model_len // frame_pair, _QWEN_FRAMES // 2), 1)
    return pairs * frame_pair


def tiles(per_tile: int, *, video: bool = True) -> LargestItem:
    """Return the rule of InternVL: a picture of 12 tiles and a thumbnail, or a video that fills the context beside
    one such picture, a tile for each frame."""

    def largest(max_model_len: int) -> int:
        picture = (12 + 1) * per_tile
        frames = max((max_model_len - picture) // per_tile, 1)
        return max(picture, frames * per_tile if video else 0)

    return largest


def no_items(max_model_len: int) -> int:
    """Return 0, the rule of a text-only model."""
    return 0


def fixed(embeds: int) -> LargestItem:
    """Return the rule of a model whose items all have the same number of embeddings."""
    return lambda max_model_len: embeds

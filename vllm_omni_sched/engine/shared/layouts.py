"""Checks encodings of other engines before an engine loads them."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from vllm_omni_sched.resource.engine.reuse import NotReused

TENSOR_NAME = "encoding"
"""Name of the only tensor of an encoding, in the format of safetensors."""

HEAD_BYTES = 1024
"""The header of an encoding is shorter."""

_DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class Layout(NamedTuple):
    """Hidden size and dtype of an encoding, the dtype as safetensors names it."""

    hidden_size: int
    dtype: str


class EncodingLayouts:
    """Decides whether a file is an encoding of an item for the model of this engine.

    1. It has one tensor, of shape (num_encoder_embeds, hidden_size).
    2. Hidden size and dtype are those that this engine has last made for an item of the same modality; before that,
       those of ``expected``.
    3. Where neither is known, no encoding is taken, so that this engine makes one.

    Args:
        expected: by modality; under "" that of all others, if the configuration of the model gives it.
    """

    def __init__(self, expected: dict[str, Layout]) -> None:
        self._known = dict(expected)

    def why_not(self, head: bytes, modality: str, num_embeds: int) -> NotReused | None:
        """Return why the item cannot have this encoding; None if it can.

        Args:
            head: the first `HEAD_BYTES` of the file.
            modality, num_embeds: of the item.
        """
        wanted = self._known.get(modality, self._known.get(""))
        if wanted is None:
            return NotReused.UNKNOWN_LAYOUT
        return None if _shape_of(head) == (num_embeds, wanted) else NotReused.OTHER_LAYOUT

    def learn(self, head: bytes, modality: str) -> None:
        """Take the layout of an encoding that this engine has made."""
        found = _shape_of(head)
        if found is not None:
            self._known[modality] = found[1]


def expected_layouts(vllm_config: Any) -> dict[str, Layout]:
    """Return the layouts of a model's encodings, as far as its configuration tells.

    Some models append to the embeddings: hidden states of several layers (deepstack), or positions where a part of the
    tokens of videos is pruned. vLLM measures the width for each modality, from 0.31 on.
    """
    model = vllm_config.model_config
    dtype = _DTYPES.get(str(model.dtype))
    if dtype is None:
        return {}
    widths = getattr(vllm_config.ec_transfer_config, "mm_encoder_output_widths", None) or {}
    found = {modality: Layout(width, dtype) for modality, width in widths.items()}
    prunes = getattr(getattr(model, "multimodal_config", None), "video_pruning_rate", None)
    if not (prunes or "deepstack" in model.hf_config.to_json_string()):
        found[""] = Layout(model.get_inputs_embeds_size(), dtype)
    return found


def _shape_of(head: bytes) -> tuple[int, Layout] | None:
    """Return the number of embeddings of an encoding, and its layout; None if it is none."""
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > len(head) - 8:
        return None
    try:
        tensors = json.loads(head[8 : 8 + length])
        (num_embeds, hidden_size), dtype = tensors[TENSOR_NAME]["shape"], tensors[TENSOR_NAME]["dtype"]
    except (ValueError, KeyError, TypeError):
        return None
    return num_embeds, Layout(hidden_size, dtype)

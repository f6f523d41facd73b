"""Checks encodings of other hosts before an engine loads them: whoever reaches the store can put any bytes there."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from safetensors import SafetensorError, deserialize

from vllm_omni_sched.connectors.between_hosts import SharedItem

TENSOR_NAME = "encoding"
"""Name of the only tensor of an encoding."""

_DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


class Layout(NamedTuple):
    """Hidden size and dtype of an encoding, the dtype as safetensors names it."""

    hidden_size: int
    dtype: str


class EncodingLayouts:
    """Decides whether bytes from the store between hosts are an encoding of an item for the model of this engine.

    1. They are one tensor in the format of safetensors, of shape (num_encoder_embeds, hidden_size).
    2. Hidden size and dtype are those that this engine has last made for an item of the same modality; before that,
       those of ``expected``.
    3. Where neither is known, no encoding is taken, so that this engine makes one.

    Args:
        expected: as the configuration of the model gives it; None: it does not tell.
    """

    def __init__(self, expected: Layout | None) -> None:
        self._expected = expected
        self._made: dict[str, Layout] = {}  # by modality

    def can_tell(self, item: SharedItem) -> bool:
        """Return whether hidden size and dtype of the item's encoding are known."""
        return self._wanted(item) is not None

    def why_refused(self, data: bytes, item: SharedItem) -> str | None:
        """Return what is wrong with an encoding; None if nothing is."""
        try:
            num_embeds, found = _shape_of(data)
        except ValueError as error:
            return str(error)
        if num_embeds != item.num_embeds:
            return f"it has {num_embeds} embeddings, and the item has {item.num_embeds}"
        wanted = self._wanted(item)
        if wanted is not None and found != wanted:
            return (
                f"its hidden size is {found.hidden_size} and its dtype {found.dtype}, in place of "
                f"{wanted.hidden_size} and {wanted.dtype}"
            )
        return None

    def learn(self, data: bytes, item: SharedItem) -> None:
        """Take the hidden size and the dtype of an encoding that this engine has made, if it is as in rule 1."""
        with suppress(ValueError):
            self._made[item.modality] = _shape_of(data)[1]

    def _wanted(self, item: SharedItem) -> Layout | None:
        return self._made.get(item.modality, self._expected)


def layout_of(vllm_config: Any) -> Layout | None:
    """Return the layout of the encodings of a model; None if its configuration does not tell.

    Some models append to the embeddings: hidden states of several layers (deepstack), or positions where a part of the
    tokens of videos is pruned.
    """
    model = vllm_config.model_config
    dtype = _DTYPES.get(str(model.dtype))
    prunes = getattr(getattr(model, "multimodal_config", None), "video_pruning_rate", None)
    if dtype is None or prunes or "deepstack" in model.hf_config.to_json_string():
        return None
    return Layout(model.get_inputs_embeds_size(), dtype)


def _shape_of(data: bytes) -> tuple[int, Layout]:
    """Return the number of embeddings of an encoding, and its layout.

    Raises:
        ValueError: it is none; the message says why.
    """
    try:
        tensors = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise ValueError(f"it is not in the format of safetensors ({error})") from error
    if tensors.keys() != {TENSOR_NAME}:
        raise ValueError(f"it has the tensors {sorted(tensors)[:4]} in place of {TENSOR_NAME!r}")
    shape, dtype = tensors[TENSOR_NAME]["shape"], tensors[TENSOR_NAME]["dtype"]
    if len(shape) != 2:
        raise ValueError(f"it has {len(shape)} dimensions in place of 2")
    return shape[0], Layout(shape[1], dtype)

"""Handle audio in the outputs of a stage, part by part."""

from __future__ import annotations

import copy
from dataclasses import is_dataclass, replace
from typing import Any

KEYS = "audio", "model_outputs"  # keys under which stages put audio


def num_samples(completion: Any) -> int | None:
    """Return the number of audio samples of a completion; None if it has no audio."""
    found = _audio(completion)
    return None if found is None else int(found[1].shape[-1])


def without_first_samples(completion: Any, count: int) -> Any:
    """Return the completion without its first ``count`` samples."""
    found = _audio(completion)
    if found is None or not count:
        return completion
    key, audio = found
    rest, payload = copy.copy(completion), completion.multimodal_output
    if is_dataclass(payload) and not isinstance(payload, type):
        rest.multimodal_output = replace(payload, tensors={**payload.tensors, key: audio[..., count:]})  # type: ignore[attr-defined]
    else:
        rest.multimodal_output = {**payload, key: audio[..., count:]}
    return rest


def _audio(completion: Any) -> tuple[str, Any] | None:
    """Return the key and the tensor of the audio; None if there is none."""
    import torch

    payload = getattr(completion, "multimodal_output", None) or {}
    for key in KEYS:
        value = payload.get(key)
        if isinstance(value, list) and value and all(isinstance(one, torch.Tensor) and one.ndim for one in value):
            value = torch.cat(value, dim=-1)
        if isinstance(value, torch.Tensor) and value.ndim:
            return key, value
    return None

"""Sound in what a stage puts out, a part at a time."""

from __future__ import annotations

import copy
from dataclasses import is_dataclass, replace
from typing import Any

KEYS = "audio", "model_outputs"  # under which stages put it


def samples(completion: Any) -> int | None:
    """How many of them a completion has; None: no sound."""
    found = _sound(completion)
    return None if found is None else int(found[1].shape[-1])


def without_first(completion: Any, count: int) -> Any:
    """The same completion, without its first samples."""
    found = _sound(completion)
    if found is None or not count:
        return completion
    key, sound = found
    rest, payload = copy.copy(completion), completion.multimodal_output
    if is_dataclass(payload) and not isinstance(payload, type):
        rest.multimodal_output = replace(payload, tensors={**payload.tensors, key: sound[..., count:]})  # type: ignore[attr-defined]
    else:
        rest.multimodal_output = {**payload, key: sound[..., count:]}
    return rest


def _sound(completion: Any) -> tuple[str, Any] | None:
    """Its key, and the tensor."""
    import torch

    payload = getattr(completion, "multimodal_output", None) or {}
    for key in KEYS:
        value = payload.get(key)
        if isinstance(value, list) and value and all(isinstance(one, torch.Tensor) and one.ndim for one in value):
            value = torch.cat(value, dim=-1)
        if isinstance(value, torch.Tensor) and value.ndim:
            return key, value
    return None

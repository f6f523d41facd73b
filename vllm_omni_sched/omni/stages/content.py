"""Compute a key for the input of a stage's work: equal keys mean equal outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from vllm_omni_sched.graph.merging import content_key
from vllm_omni_sched.omni.stages.requests import extra_of

OURS = "omni_"  # our own keys in `extra_args`: they set a request's urgency, not its content
ORIENTATION = 0x0112  # the one EXIF tag that changes the visible image
PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
IDS = frozenset({"global_request_id", "request_id"})  # vLLM-Omni writes them into prompts


def first_key(state: Any, request: Any, stages: Iterable[int]) -> str | None:
    """Return the key of a request's work at its first stage; None if the output may differ between runs.

    Args:
        state: vLLM-Omni's `OrchestratorRequestState`.
        request: the request as sent to the engine.
        stages: the stages whose sampling parameters matter.
    """
    params = [state.sampling_params_list[stage_id] for stage_id in stages]
    if not all(map(_repeats, params)) or getattr(request, "prompt_embeds", None) is not None:
        return None
    try:
        return content_key(
            {
                "prompt": _plain(_without_items(state.prompt, request)),
                "request": _request(request),
                "params": [_params(each) for each in params],
                "ends": [state.final_stage_id, *sorted(state.final_output_stage_ids)],
            }
        )
    except TypeError:
        return None  # the content of a value is unknown


def next_key(
    state: Any, stage_id: int, upstream: str | Sequence[str | None], stages: Iterable[int] | None = None
) -> str | None:
    """Return the key at a later stage: its input follows from the earlier work and from the prompt.

    Args:
        upstream: the keys at the stages that it reads.
        stages: the stages whose sampling parameters matter; None: this one.
    """
    each = [state.sampling_params_list[one] for one in ([stage_id] if stages is None else stages)]
    if not all(map(_repeats, each)):
        return None
    try:
        params = _params(each[0]) if stages is None else [_params(one) for one in each]
        return content_key({"stage": stage_id, "upstream": upstream, "params": params})
    except TypeError:
        return None


def _repeats(params: Any) -> bool:
    """Return whether the same input gives the same output: nothing is sampled, or all of it from a seed."""
    if getattr(params, "n", 1) != 1:
        return False
    return getattr(params, "temperature", None) == 0 or getattr(params, "seed", None) is not None


def seeded(params: Any) -> bool:
    """Return whether a diffusion stage starts from the same noise every time; its temperature has no effect."""
    return getattr(params, "seed", None) is not None or extra_of(params).get("seed") is not None


def _without_items(prompt: Any, request: Any) -> Any:
    """Return a prompt without its multimodal data if the engine's request identifies all of it by content."""
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    if not isinstance(data, Mapping):
        return prompt
    named = Counter(item.modality for item in getattr(request, "mm_features", None) or ())
    given = {modality: len(items) if isinstance(items, list) else 1 for modality, items in data.items()}
    if named != given:
        return prompt
    return {name: value for name, value in prompt.items() if name != "multi_modal_data"}


def _request(request: Any) -> dict[str, Any]:
    if not hasattr(request, "prompt_token_ids"):
        return {"prompt": _plain(request)}  # of a diffusion stage
    lora = getattr(request, "lora_request", None)
    return {
        "tokens": list(request.prompt_token_ids or ()),
        "items": [
            [item.identifier, item.modality, item.mm_position.offset, item.mm_position.length]
            for item in request.mm_features or ()
        ],
        "lora": [lora.lora_name, lora.lora_int_id, lora.lora_path] if lora is not None else None,
        "salt": request.cache_salt,
        "information": _plain(msgspec.to_builtins(getattr(request, "additional_information", None))),
        "buffer": _plain(getattr(request, "model_intermediate_buffer", None)),
    }


def _params(params: Any) -> Any:
    plain = _plain(_given(params) if isinstance(params, msgspec.Struct) else dict(vars(params)))
    extra = plain.pop("extra_args", None)
    if isinstance(extra, dict):
        extra = {name: value for name, value in extra.items() if not name.startswith(OURS)}
    if extra:
        plain["extra_args"] = extra
    return plain


def _given(params: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that do not have their default: of dozens, a few."""
    names, defaults = params.__struct_fields__, params.__struct_defaults__
    found = {name: getattr(params, name) for name in names[: len(names) - len(defaults)]}
    for name, default in zip(names[len(found) :], defaults, strict=True):
        value = getattr(params, name)
        if value is not default and (type(value) is not type(default) or value != default):
            found[name] = value
    return found


def _plain(value: Any) -> Any:
    """Return the content in plain values, without request ids; a TypeError says that there are others."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items() if name not in IDS}
    if isinstance(value, set | frozenset):
        return sorted(map(_plain, value), key=repr)
    if isinstance(value, list | tuple):
        if PLAIN.issuperset(map(type, value)):  # such as token ids, of which there are many
            return value
        return [_plain(item) for item in value]
    return _content(value)


def _content(value: Any) -> Any:
    """Return the content of arrays, tensors and images, with their type and shape, which the bytes do not tell."""
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    kind = type(value).__module__.partition(".")[0]
    if kind == "torch" and hasattr(value, "untyped_storage"):
        return _tensor(value)
    if kind == "numpy" and hasattr(value, "dtype"):  # arrays and scalars
        if value.dtype.hasobject:
            raise TypeError("arrays of objects have no content key")
        return {"array": value.dtype.str, "shape": list(value.shape), "bytes": value.tobytes()}
    if kind == "PIL" and hasattr(value, "tobytes"):
        return _picture(value)
    raise TypeError(f"values of type {type(value).__qualname__} have no content key")


def _tensor(tensor: Any) -> dict[str, Any]:
    import torch

    if tensor.layout is not torch.strided:
        raise TypeError(f"tensors of layout {tensor.layout} have no content key")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return {
        "tensor": str(tensor.dtype),
        "shape": list(tensor.shape),
        "bytes": flat.view(torch.uint8).numpy().tobytes(),
    }


def _picture(picture: Any) -> dict[str, Any]:
    if getattr(picture, "n_frames", 1) > 1:
        raise TypeError("images of several frames have no content key")
    return {
        "picture": picture.mode,
        "size": list(picture.size),
        "bytes": picture.tobytes(),
        "palette": picture.getpalette(),
        "transparency": _plain(picture.info.get("transparency")),
        "orientation": picture.getexif().get(ORIENTATION),
    }

"""The sampling rules: vLLM's video loaders, which choose the frames that ours decodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from importlib import import_module
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import RequestError, VideoInputError
from vllm_omni_sched.engine.fitted import LOADER_VARIABLE
from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, REALTIME
from vllm_omni_sched.resource.engine.profile import VIDEO_LOADER

NAME = VIDEO_LOADER
"""Name of our loader in vLLM's registry."""

CLASSES = {sla.name: sla for sla in (REALTIME, INTERACTIVE, BATCH)}
"""Classes of requests by name, most urgent first."""

_DEFAULT = "opencv"


class StockReason(str, Enum):
    """Reason why a video was decoded by vLLM's own code although our loader was chosen."""

    OWN_READER = "own_reader"  # the rule reads frames by its own code
    OWN_DECODING = "own_decoding"  # the rule never called the decoder that ours replaces


def registry() -> Any:
    """Return vLLM's registry of video loaders."""
    return import_module(compat.VIDEO).VIDEO_LOADER_REGISTRY


def default_rule() -> str:
    """Return the loader that stock vLLM takes for a model that has none of its own."""
    named = os.environ.get(LOADER_VARIABLE, _DEFAULT)
    return _DEFAULT if named == NAME else named


def rule_of_model(model_config: Any) -> str | None:
    """Return the loader that stock vLLM would take for this model by its video processor; None if it has none.

    vLLM 0.22 has no such mapping.
    """
    find = getattr(registry(), "get_backend_for_video_processor", None)
    processor = video_processor_of(model_config) if find is not None else None
    named: str | None = find(processor) if find is not None and processor is not None else None
    return named


def video_processor_of(model_config: Any) -> str | None:
    """Return the name of the class of a model's video processor; None if it has none, or vLLM (0.22) does not know."""
    find = getattr(import_module("vllm.transformers_utils.processor"), "get_video_processor_cls_name", None)
    named: str | None = find(model_config) if find is not None else None
    return named


def rule_named(name: str) -> Any:
    """Return the loader class of that name.

    Raises:
        RequestError: there is none, or it decodes on a GPU.
    """
    known = registry()
    rule = known.name2class.get(name)
    needs_gpu = getattr(known, "backend_requires_gpu", lambda _: False)
    if rule is None or name == NAME or needs_gpu(name):
        fit = sorted(other for other in known.name2class if other != NAME and not needs_gpu(other))
        raise RequestError(f"sampling is {name!r}, which is none of vLLM's sampling rules: name one of {fit}")
    return rule


def reads_itself(rule: Any) -> bool:
    """Return whether a loader class reads frames by code of its own, so that the frames it needs are unknown.

    GLM's loader seeks with vLLM's code, and returns the frames that reading in order gives.
    """
    reader = getattr(rule, "read_frames", None)
    module = getattr(getattr(reader, "__func__", reader), "__module__", "")
    return not module.startswith("vllm.")


def wanted_of(frames: Sequence[int]) -> list[int]:
    """Return the frames to decode for a rule's frame numbers: each once, in display order, as vLLM's loader reads them.

    Raises:
        VideoInputError: the rule wants none.
    """
    wanted = sorted({int(frame) for frame in frames if frame >= 0})
    if not wanted:
        raise VideoInputError("the sampling rule chooses no frame of this video, which may be empty")
    return wanted

"""Which of vLLM's video loaders chooses the frames: the rule. Ours only decodes them."""

from __future__ import annotations

import os
from enum import Enum
from importlib import import_module
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.errors import RequestError
from vllm_omni_sched.graph.order import BATCH, INTERACTIVE, REALTIME

NAME = "omni_flashcodec"
"""Of our loader, in vLLM's registry."""

CLASSES = {sla.name: sla for sla in (REALTIME, INTERACTIVE, BATCH)}
"""Of requests, by name; the first go first."""

ENVIRONMENT = "VLLM_VIDEO_LOADER_BACKEND"
_DEFAULT = "opencv"


class StockReason(str, Enum):
    """Why a video was decoded by vLLM's own code although our loader was asked."""

    OWN_READER = "own_reader"  # the rule reads frames in a way of its own
    OWN_DECODING = "own_decoding"  # the rule never came to the decoder that ours stands for


def registry() -> Any:
    """vLLM's registry of video loaders."""
    return import_module(compat.VIDEO).VIDEO_LOADER_REGISTRY


def default_rule() -> str:
    """The loader that stock vLLM takes for a model that has none of its own."""
    named = os.environ.get(ENVIRONMENT, _DEFAULT)
    return _DEFAULT if named == NAME else named


def rule_of_model(model_config: Any) -> str | None:
    """The loader that stock vLLM would take for this model by its video processor; None where it has none.

    vLLM 0.22 knows no such mapping.
    """
    find = getattr(registry(), "get_backend_for_video_processor", None)
    processor = getattr(import_module("vllm.transformers_utils.processor"), "get_video_processor_cls_name", None)
    if find is None or processor is None:
        return None
    named: str | None = find(processor(model_config))
    return named


def rule_named(name: str) -> Any:
    """The loader class of that name.

    Raises:
        RequestError: there is none, or it is one that does its decoding on a GPU.
    """
    known = registry()
    rule = known.name2class.get(name)
    needs_gpu = getattr(known, "backend_requires_gpu", lambda _: False)
    if rule is None or name == NAME or needs_gpu(name):
        fit = sorted(other for other in known.name2class if other != NAME and not needs_gpu(other))
        raise RequestError(f"sampling is {name!r}, which is none of vLLM's sampling rules: name one of {fit}")
    return rule


def reads_itself(rule: Any) -> bool:
    """Whether a loader class reads frames by code of its own, of which nobody knows what it wants.

    GLM's seeks, and gives what reading in order gives.
    """
    reader = getattr(rule, "read_frames", None)
    module = getattr(getattr(reader, "__func__", reader), "__module__", "")
    return not module.startswith("vllm.")

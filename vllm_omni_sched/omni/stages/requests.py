"""Describe requests to the policies: class, cost, and data shared with others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_sched.config.stage_options.graph import PriorityOptions
from vllm_omni_sched.core.pipeline.requests import RequestClasses, item_key
from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.resource.pipeline.stage_cost import Features

logger = get_logger(__name__)

CLASS, USER = "omni_class", "omni_user"  # in `extra_args` of a request's first sampling parameters
UNKNOWN_TOKENS = 128  # assumed output of a request that sets no limit
LOGGED = 64  # most unknown class names that are logged; clients choose them


class Classes(RequestClasses):
    """Finds the class of a request; the front end has checked which ones its client may name (`front_end`)."""

    def __init__(self, options: PriorityOptions) -> None:
        super().__init__(options)
        self._unknown: set[str] = set()

    def of(self, params: Any, modality: str) -> SlaClass:
        """Return the class that the request names if it exists, else that of its modality."""
        usual = self.usual(modality)
        name = extra_of(params).get(CLASS)
        if name is None:
            return usual
        named = self.by_name.get(str(name))
        if named is None:
            self._tell(str(name)[:64], usual)
        return named or usual

    def _tell(self, name: str, usual: SlaClass) -> None:
        if name not in self._unknown and len(self._unknown) < LOGGED:
            self._unknown.add(name)
            known = ", ".join(self.by_name)
            logger.warning("a request names %s=%r, which is not one of %s; using %r", CLASS, name, known, usual.name)


def extra_of(params: Any) -> Mapping[str, Any]:
    extra = getattr(params, "extra_args", None)
    return extra if isinstance(extra, Mapping) else {}


def keys_of(request: Any, params: Any) -> frozenset[str]:
    """Return keys of data that other requests may share: the user, multimodal items."""
    keys = {item_key(item.identifier) for item in getattr(request, "mm_features", None) or ()}
    user = extra_of(params).get(USER)
    if user is not None:
        keys.add(f"user {user}")
    return frozenset(keys)


def modality_of(request: Any) -> str:
    found = {item.modality for item in getattr(request, "mm_features", None) or ()}
    return next((each for each in ("video", "audio", "image") if each in found), "text")


def features_of(request: Any, params: Any) -> Features:
    """Return the features of a request in one stage: its input, and its most output."""
    items = getattr(request, "mm_features", None) or ()
    pixels = _count(params, "width") * _count(params, "height")
    pixels *= (_count(params, "num_outputs_per_prompt") or 1) * (_count(params, "num_frames") or 1)
    return Features(
        prompt_tokens=len(getattr(request, "prompt_token_ids", None) or ()),
        output_tokens=_output_tokens(params),
        items=len(items),
        pixels=pixels,
        steps=_count(params, "num_inference_steps"),
    )


def _count(params: Any, name: str) -> int:
    """Return a count of a diffusion stage, which vLLM-Omni also accepts in `extra_args` of plain `SamplingParams`."""
    found = getattr(params, name, None) or extra_of(params).get(name)
    return found if isinstance(found, int) and found > 0 else 0


def _output_tokens(params: Any) -> int:
    if not hasattr(params, "max_tokens"):
        return 0
    return params.max_tokens if params.max_tokens is not None else UNKNOWN_TOKENS

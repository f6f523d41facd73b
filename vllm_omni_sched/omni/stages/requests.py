"""Describe requests to the policies: class, cost, and data shared with others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_sched.graph.order import SlaClass
from vllm_omni_sched.logs import get_logger
from vllm_omni_sched.resource.stage_cost import Features
from vllm_omni_sched.stage_options.graph import ClassTargets, PriorityOptions

logger = get_logger(__name__)

CLASS, USER = "omni_class", "omni_user"  # in `extra_args` of a request's first sampling parameters
UNKNOWN_TOKENS = 128  # assumed output of a request that sets no limit
LOGGED = 64  # most unknown class names that are logged; clients choose them


@dataclass
class Known:
    """A request on its way through the pipeline.

    ``costs``: seconds by stage; ``features``: data of these estimates; ``replicas``: replicas that it ran on, by stage.
    """

    request_id: str
    arrival: float
    sla: SlaClass
    low: bool
    priority: int
    modality: str
    keys: frozenset[str]
    nbytes: int
    features: dict[int, Features] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    replicas: dict[int, int] = field(default_factory=dict)


class Classes:
    """The classes of the options, by name. The front end checks which ones clients may name (`front_end`)."""

    def __init__(self, options: PriorityOptions) -> None:
        self.by_name = {
            name: SlaClass(name, _seconds(each), math.inf, each.rank) for name, each in options.classes.items()
        }
        ranks = {each.rank for each in self.by_name.values()}
        self._lowest = max(ranks) if len(ranks) > 1 else math.inf
        self.default = self.by_name[options.default_class]
        self._by_modality = {modality: self.by_name[name] for modality, name in options.by_modality.items()}
        self._unknown: set[str] = set()

    def of(self, params: Any, modality: str) -> SlaClass:
        """Return the class that the request names if it exists, else that of its modality."""
        usual = self._by_modality.get(modality, self.default)
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

    def is_low(self, sla: SlaClass) -> bool:
        return sla.rank >= self._lowest


def _seconds(targets: ClassTargets) -> float:
    """Return the seconds from the arrival of a request to its deadline on the whole path."""
    given = targets.ttft_ms if targets.e2e_ms is None else targets.e2e_ms
    return math.inf if given is None else given / 1e3


def extra_of(params: Any) -> Mapping[str, Any]:
    extra = getattr(params, "extra_args", None)
    return extra if isinstance(extra, Mapping) else {}


def keys_of(request: Any, params: Any) -> frozenset[str]:
    """Return keys of data that other requests may share: the user, multimodal items."""
    keys = {f"item {item.identifier}" for item in getattr(request, "mm_features", None) or ()}
    user = extra_of(params).get(USER)
    if user is not None:
        keys.add(f"user {user}")
    return frozenset(keys)


def modality_of(request: Any) -> str:
    found = {item.modality for item in getattr(request, "mm_features", None) or ()}
    return next((each for each in ("video", "audio", "image") if each in found), "text")


def bytes_of(request: Any) -> int:
    """Return the bytes of a request's multimodal items and prompt."""
    held = 8 * len(getattr(request, "prompt_token_ids", None) or ())
    for item in getattr(request, "mm_features", None) or ():
        for name in item.data or ():
            held += getattr(getattr(item.data[name], "data", None), "nbytes", 0)
    return held


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

"""The models whose M-RoPE positions may be continued, and the reasons why those of others may not.

Continuing is exact if a model's function has the following properties, which were verified in the source of each
function named here, in every supported release:

* text and items are walked in order of offset, and each stretch starts at the highest
  position of the one before it, plus one, and at nothing else;
* an item's positions depend on its own data and its own tokens only;
* the delta is the highest position, plus one, minus the number of tokens.

Sources are identified by digest. If a release changes a function, its positions are computed in full until the new
source has been read and its digest added.
"""

import hashlib
import inspect
import textwrap
from typing import Any

_MODELS = "vllm.model_executor.models."

VERIFIED: dict[str, dict[str, tuple[str, ...]]] = {
    # 0.22.1 and 0.30, or all; then 0.31 and later
    "qwen2_vl.Qwen2VLForConditionalGeneration": {
        "get_mrope_input_positions": ("64a0fa7ac94a870f",),
        "iter_mm_grid_thw": ("588aaec302f8eaca", "10486e34abf3d292"),
    },
    "qwen2_5_vl.Qwen2_5_VLForConditionalGeneration": {
        "get_mrope_input_positions": ("64a0fa7ac94a870f",),
        "iter_mm_grid_thw": ("588aaec302f8eaca", "69d21600c8e404f1"),
    },
    "qwen3_vl.Qwen3VLForConditionalGeneration": {
        "get_mrope_input_positions": ("e90bfad30c1455b1",),
        "_get_mrope_input_positions": ("f341cbdd2a97620f", "23870cdc888b99cc"),
        "_iter_mm_grid_hw": ("5c9e1f6e306458ab", "35dfad250f41ec6d"),
    },
    # 0.22.1, then 0.30 and later
    "glm4_1v.Glm4vForConditionalGeneration": {
        "get_mrope_input_positions": ("de55e315330aedef",),
        "iter_mm_grid_thw": ("d9cba9595dd8d273", "6e87e1612e304917"),
    },
    "ernie45_vl.Ernie4_5_VLMoeForConditionalGeneration": {
        "get_mrope_input_positions": ("be61eef3b24c4595",),
        "iter_mm_grid_thw": ("0270716816e80121", "555b92dc015795ad"),
    },
    "qwen3_asr.Qwen3ASRForConditionalGeneration": {
        "get_mrope_input_positions": ("d82c068d30a56daf", "1fd71e2e1c81f71d"),
    },
}
"""Class that defines the function -> functions that it consists of -> digests of the sources that were verified."""


def digest(function: Any) -> str | None:
    """Return the digest of the function's source as it runs; None if there is no source, or the function is wrapped."""
    if hasattr(function, "__wrapped__"):
        return None
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return None
    return hashlib.sha256(textwrap.dedent(source).strip().encode()).hexdigest()[:16]


def why_recomputed(model: Any) -> str | None:
    """Return why positions of this model are computed in full at every update; None if they can be continued.

    A subclass counts as the class whose functions it inherits.
    """
    cls = type(model)
    owner = next((base for base in cls.__mro__ if "get_mrope_input_positions" in vars(base)), None)
    if owner is None:
        return f"{cls.__qualname__} computes no M-RoPE positions"
    functions = VERIFIED.get(f"{owner.__module__}.{owner.__qualname__}".removeprefix(_MODELS))
    if functions is None:
        return f"{owner.__qualname__} is not among the models whose positions are known to continue"
    for name, digests in functions.items():
        found = inspect.getattr_static(cls, name, None)
        if found is not vars(owner).get(name) or name in vars(model):
            return f"{cls.__qualname__} has a {name} of its own"
        if digest(getattr(owner, name)) not in digests:
            return f"the source of {owner.__qualname__}.{name} differs from the versions that were verified"
    return None

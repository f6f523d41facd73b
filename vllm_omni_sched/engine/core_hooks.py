"""Hooks in vLLM's `EngineCore`, for engines that keep encodings outside of vLLM's encoder cache.

1. `preprocess_add_request` runs on the thread that receives requests: the items are hashed there (`Contents`), and not
   in a step.
2. `collective_rpc` carries the calls of clients to the workers, and with them every way to change the weights in place:
   weight transfer, ``reload_weights``, ``apply_model``, and functions of one's own. vLLM then requires a call of
   `reset_encoder_cache`, because its encoder cache has encodings of the former weights; items that are not in it are
   encoded with the new ones in any case. So all that we keep is given up at each of these calls, whatever it does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.config.errors import MissingSymbolError
from vllm_omni_sched.engine.ahead.runner_hooks import forget_encodings
from vllm_omni_sched.imports import wrap_once


def watch_core() -> None:
    """Wrap the two methods in this process; idempotent.

    Raises:
        MissingSymbolError: this vLLM has no `collective_rpc`, so that weights may change unnoticed.
    """
    core = compat.find(compat.ENGINE_CORE, "EngineCore")
    if not hasattr(core, "collective_rpc"):
        raise MissingSymbolError(
            f"encodings cannot be kept, because vLLM {compat.vllm_version()} has no EngineCore.collective_rpc by which "
            "weights that change are noticed: leave 'encode_ahead' and 'encoder_share_bytes' out"
        )
    wrap_once(core, "collective_rpc", _forgets)
    if hasattr(core, "preprocess_add_request"):
        wrap_once(core, "preprocess_add_request", _hashes)


def _extension_of(core: Any) -> Any:
    """Return the extension of the scheduler of this engine; None if it keeps no encodings, or has none yet."""
    extension = getattr(getattr(core, "scheduler", None), "omni", None)
    return extension if getattr(extension, "keepers", ()) else None


def _forgets(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        extension = _extension_of(self)
        if extension is None:
            return collective_rpc(self, *args, **kwargs)
        self.model_executor.collective_rpc(forget_encodings)  # no lane may compute while weights change
        try:
            return collective_rpc(self, *args, **kwargs)
        finally:
            extension.forget_encodings()

    return wrapper


def _hashes(preprocess_add_request: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = preprocess_add_request(self, *args, **kwargs)
        extension = _extension_of(self)
        for keeper in () if extension is None else extension.keepers:
            for feature in prepared[0].mm_features or ():
                keeper.hash_ahead(feature)
        return prepared

    return wrapper

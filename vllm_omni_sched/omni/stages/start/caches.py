"""Detect stages that send their KV caches directly to a diffusion stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def sends_caches(pools: Iterable[Any]) -> bool:
    """Return whether one of these stages sends its KV cache.

    A cache is sent once, under the id of the request that made it: no other request can get it, and it is lost with the
    replica that received it.
    """
    return any(_sends(pool.stage_vllm_config) for pool in pools)


def _sends(config: Any) -> bool:
    ours = getattr(getattr(config, "model_config", None), "omni_kv_config", None)
    asked = ours.get("need_send_cache") if isinstance(ours, Mapping) else getattr(ours, "need_send_cache", False)
    return bool(asked) or getattr(getattr(config, "kv_transfer_config", None), "kv_role", None) == "kv_producer"

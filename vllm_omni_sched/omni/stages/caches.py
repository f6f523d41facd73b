"""Stages that send their KV caches to a diffusion stage, beside what goes through the front end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def sends_caches(pools: Iterable[Any]) -> bool:
    """Whether one of these stages does.

    A cache is sent once, under the name of the request that made it: nobody else can get it, and it is gone with the
    replica that has got it.
    """
    return any(_sends(pool.stage_vllm_config) for pool in pools)


def _sends(config: Any) -> bool:
    ours = getattr(getattr(config, "model_config", None), "omni_kv_config", None)
    asked = ours.get("need_send_cache") if isinstance(ours, Mapping) else getattr(ours, "need_send_cache", False)
    return bool(asked) or getattr(getattr(config, "kv_transfer_config", None), "kv_role", None) == "kv_producer"

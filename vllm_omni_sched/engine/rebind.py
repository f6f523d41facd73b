"""Wrappers of vLLM functions that the scheduler calls by module name; they add support for a `FeatureList`.

For any other list the wrapper calls the function itself. The wrappers are installed when the first `OmniScheduler` of a
process is built, so a process without one runs vLLM's own functions.

vLLM leaves no other way: its scheduler, its KV cache utilities and its block pool call these functions by their names
in their own modules, not through an object that could be replaced.
"""

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from vllm_omni_sched import compat
from vllm_omni_sched.imports import wrap_once
from vllm_omni_sched.items import FeatureList


def bind(active: Collection[str]) -> None:
    """Wrap the functions that these features need; idempotent."""
    if "windows" in active:
        bind_windows()
    if "strip_frontier" in active:
        bind_strip_frontier()
    if "kv_event_window" in active:
        bind_kv_event_window()


def bind_strip_frontier() -> None:
    """Make `strip_covered_mm_data` touch only the items that changed since this request's last message."""
    strip_one = compat.strip_feature()

    def wrap(strip: Callable[..., Any]) -> Callable[..., Any]:
        def strip_covered_mm_data(mm_features: Any, num_computed_tokens: int, uses_mrope: bool = False) -> Any:
            if isinstance(mm_features, FeatureList):
                if mm_features.defer:
                    return mm_features
                return mm_features.as_sent(num_computed_tokens, lambda feature: strip_one(feature, uses_mrope))
            if uses_mrope:
                return strip(mm_features, num_computed_tokens, uses_mrope=uses_mrope)
            return strip(mm_features, num_computed_tokens)

        return strip_covered_mm_data

    wrap_once(import_module(compat.OUTPUT), "strip_covered_mm_data", wrap)


def bind_windows() -> None:
    """Make window searches in a `FeatureList` use its index: they touch no item, most of which are cold in memory."""

    def wrap(window: Callable[..., Any]) -> Callable[..., Any]:
        def get_mm_features_in_window(mm_features: Any, start: int, end: int) -> tuple[int, int]:
            if isinstance(mm_features, FeatureList) and mm_features.spans.sequential:
                return mm_features.spans.bounds(start, end)
            found: tuple[int, int] = window(mm_features, start=start, end=end)
            return found

        return get_mm_features_in_window

    for module in (compat.SCHEDULER, compat.KV_CACHE_UTILS):
        if compat.native_windows(module):
            wrap_once(import_module(module), "get_mm_features_in_window", wrap)


def bind_kv_event_window() -> None:
    """Make the search for extra keys of a block start at its first item, not at the request's first.

    Items before it end before the block. vLLM's loop would skip them one by one, with the same result.
    """

    def wrap(extra_keys: Callable[..., Any]) -> Callable[..., Any]:
        def generate_block_hash_extra_keys(
            request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
        ) -> Any:
            features = request.mm_features
            if start_mm_idx >= 0 and isinstance(features, FeatureList):
                start_mm_idx = max(start_mm_idx, features.spans.num_covered(start_token_idx))
            return extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)

        return generate_block_hash_extra_keys

    wrap_once(import_module(compat.BLOCK_POOL), "generate_block_hash_extra_keys", wrap)

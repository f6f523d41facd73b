"""The scheduler configurations that workloads run under: mostly scarce, for there decisions are made."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm_omni_sched.testing import make_item, make_request

if TYPE_CHECKING:
    from tests.differential.workload import Content


@dataclass(frozen=True)
class Settings:
    async_scheduling: bool
    use_v2_model_runner: bool
    max_num_batched_tokens: int
    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_item_embeds: int
    encoder_budget: int
    encoder_cache_size: int
    enable_prefix_caching: bool
    disable_chunked_mm_input: bool
    long_prefill_token_threshold: int
    kv_events: bool
    uses_mrope: bool
    policy: str
    log_stats: bool
    worker_is_separate_process: bool
    num_steps: int
    read_ahead: int
    many_items: bool
    fresh_contents: float
    overlapping_items: float
    nested_items: bool
    repeated_items: bool

    def scheduler_options(self) -> dict[str, Any]:
        names = list(vars(self))
        return {name: getattr(self, name) for name in names[: names.index("worker_is_separate_process")]}

    @property
    def capacity(self) -> int:
        """Tokens that one request may have: one more would wait for blocks for ever."""
        return (self.num_blocks - 2) * self.block_size


def random_settings(rng: random.Random, contents: Sequence[Content], *, many_items: bool, **overrides: Any) -> Settings:
    """Return the settings that a seed draws for these contents, with ``overrides``.

    With ``many_items`` dozens of encodings leave a request in one step, and the ids of a session's items exceed the
    table of the set that holds them: vLLM releases in the order of that set.
    """
    longest = max(content.length for content in contents)
    max_item_embeds = max(1, *(content.num_embeds for content in contents))
    disable_chunked_mm_input = rng.random() < 0.3
    # Without chunks an item must fit into one step.
    least_tokens = max(4, longest) if disable_chunked_mm_input else 4
    max_num_batched_tokens = max(least_tokens, rng.choice((48, 200) if many_items else (6, 16, 48, 200)))
    block_size = rng.choice((4, 8, 16))
    scarce_blocks = 3 + rng.choice((60, 150, 400)) // block_size
    prefix_caching = rng.random() < 0.6
    drawn = {
        "async_scheduling": rng.random() < 0.6,
        "use_v2_model_runner": rng.random() < 0.5,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": min(max_num_batched_tokens, rng.choice((1, 2, 4, 8))),
        "num_blocks": scarce_blocks if rng.random() < (0.3 if many_items else 0.8) else 1000,
        "block_size": block_size,
        "max_item_embeds": max_item_embeds,
        "encoder_budget": max_item_embeds * rng.choice((2, 20, 60) if many_items else (1, 1, 2, 20)),
        "encoder_cache_size": max_item_embeds * rng.choice((10, 20, 60) if many_items else (1, 2, 3, 20)),
        "enable_prefix_caching": prefix_caching,
        "disable_chunked_mm_input": disable_chunked_mm_input,
        "long_prefill_token_threshold": rng.choice((0, 0, 0, 5)),
        "kv_events": prefix_caching and rng.random() < 0.6,
        "uses_mrope": rng.random() < 0.15,
        "policy": rng.choice(("fcfs", "fcfs", "fcfs", "priority")),
        "log_stats": rng.random() < 0.3,
        "worker_is_separate_process": rng.random() < 0.5,
        "num_steps": rng.choice((40, 80, 120)),
        "read_ahead": 0,  # tokens behind a chunk that a drafter reads
        "many_items": many_items,
        # Probabilities: an item was never seen before; a second item lies on its tokens.
        "fresh_contents": rng.choice((0.5, 1.0) if many_items else (0.0, 0.5, 1.0)),
        "overlapping_items": rng.choice((0.0, 0.0, 0.1)),
        # What stock itself does not do right, and ours does, cannot be compared.
        "nested_items": rng.random() < 0.5 and not _bisects_items(),
        "repeated_items": _counts_uses_of_an_item(),
    }
    drawn |= overrides
    if drawn["disable_chunked_mm_input"] and drawn["long_prefill_token_threshold"]:
        # With less, stock may wait for ever (`test_stuck_requests`); a drafter reads one token more.
        drawn["long_prefill_token_threshold"] = longest + 1
    return Settings(**drawn)


def _bisects_items() -> bool:
    """Bisecting (0.23+) loses items that end before one that starts earlier."""
    from vllm.v1.core.sched import scheduler

    return hasattr(scheduler, "get_mm_features_in_window")


@cache
def _counts_uses_of_an_item() -> bool:
    """Before 0.29 a request that has consumed the first of two equal items lets go of the other's encoding as well."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    manager = EncoderCacheManager(2)
    request = make_request("probe", 2, [make_item(0, 1, "same"), make_item(1, 1, "same")])
    manager.allocate(request, 0)
    manager.check_and_update_cache(request, 1)
    manager.free_encoder_input(request, 0)
    return bool(manager.cached["same"])


def random_options(rng: random.Random) -> dict[str, Any]:
    """Options of ours that must not change a decision. Data leaves memory early, so that short sessions see it too."""
    return {
        "session_delta": rng.choices(("auto", "off"), (9, 1))[0],
        "strip_frontier": rng.choices(("auto", "off"), (9, 1))[0],
        "release": rng.choice(("spill", "keep")),
        "release_batch_items": rng.choice((1, 1, 3)),
        "spill_max_bytes": rng.choice((1 << 20, 1 << 20, 4000)),
        "metrics": False,
    }

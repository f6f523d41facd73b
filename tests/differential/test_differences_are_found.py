"""The comparison notices what it is there for: each of these small errors of ours makes some workload differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.differential.lockstep import Diverged, run_seed
from vllm_omni_sched import OmniEncoderCacheManager, OmniScheduler
from vllm_omni_sched.engine.sessions.messages import SessionReceiver
from vllm_omni_sched.items import FeatureList, ItemIndex, SessionMirror, SessionTracker

MOST_SEEDS = 30
SCARCE_BLOCKS: dict[str, Any] = {
    "use_v2_model_runner": False,
    "num_blocks": 20,
    "block_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "kv_events": True,
}
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def one_item_too_many(num_covered: Callable[..., int]) -> Callable[..., int]:
    return lambda self, position: min(num_covered(self, position) + 1, len(self))


def a_block_less(update: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Any, *args: Any) -> Any:
        message = update(self, *args)
        return message and message._replace(block_ids=tuple(group[:-1] for group in message.block_ids))

    return wrong


def nothing_back(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Any, *args: Any) -> dict[int, Any]:
        function(self, *args)
        return {}

    return wrong


def not_taken_back(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: None


def none_freed(freed: Callable[..., list[str]]) -> Callable[..., list[str]]:
    return lambda self: freed(self)[1:]


def last_item_only(apply: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, update, items, strip: apply(self, update, items[-1:], strip)


def always_a_hit_less(check: Callable[..., bool]) -> Callable[..., bool]:
    def wrong(self: Any, request: Any, input_id: int) -> bool:
        return check(self, request, input_id) if input_id != 1 else False

    return wrong


def set_built_anew(free: Callable[..., None]) -> Callable[..., None]:
    """vLLM releases what a request holds in the order of a set, which `difference_update` rebuilds."""

    def wrong(self: Any, request: Any, input_id: int) -> None:
        free(self, request, input_id)
        if held := self.request_cached_ids.get(request.request_id):
            held.difference_update([input_id])

    return wrong


ERRORS: list[tuple[type, str, Wrap]] = [
    (ItemIndex, "num_covered", one_item_too_many),
    (SessionTracker, "update", a_block_less),
    (SessionMirror, "apply", last_item_only),
    (FeatureList, "rewind", nothing_back),
    (SessionReceiver, "restore", not_taken_back),
    (OmniEncoderCacheManager, "get_freed_mm_hashes", none_freed),
    (OmniEncoderCacheManager, "check_and_update_cache", always_a_hit_less),
    (OmniEncoderCacheManager, "free_encoder_input", set_built_anew),
]


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "name", "wrap"), ERRORS, ids=[f"{c.__name__}.{n}" for c, n, _ in ERRORS])
def test_error(monkeypatch: pytest.MonkeyPatch, cls: type, name: str, wrap: Wrap) -> None:
    monkeypatch.setattr(cls, name, wrap(getattr(cls, name)))
    under: dict[str, Any] = {"many_items": True} if wrap is set_built_anew else SCARCE_BLOCKS
    with contextlib.suppress(Diverged, AssertionError, LookupError, RuntimeError):  # or it does not get that far
        for seed in range(MOST_SEEDS):
            run_seed(seed, OmniScheduler, options={"metrics": False, "release_batch_items": 1}, **under)
        pytest.fail(f"{MOST_SEEDS} workloads the same in spite of an error in {cls.__name__}.{name}")

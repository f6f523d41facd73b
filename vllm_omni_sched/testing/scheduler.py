"""Build the real scheduler, ready to take requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from vllm_omni_sched.testing.config import make_vllm_config
from vllm_omni_sched.testing.model import FixedItemSizeRegistry


def make_scheduler(
    scheduler_cls: type[Scheduler] | None = None,
    *,
    max_item_embeds: int = 1,
    use_v2_model_runner: bool = False,
    log_stats: bool = False,
    **config: Any,
) -> Scheduler:
    """Return a scheduler over one full-attention KV cache group.

    `scheduler_cls=None` takes vLLM's `AsyncScheduler` or `Scheduler`, whichever fits `async_scheduling`. `config`
    goes to `make_vllm_config`. `max_item_embeds` is the size of the model's largest item, in
    encoder embeddings: the floor of the encoder budget and of the encoder cache. `use_v2_model_runner` only changes
    the scheduler's messages; no runner is built.
    """
    vllm_config = make_vllm_config(**config)
    cls = scheduler_cls or _stock_scheduler_cls(vllm_config.scheduler_config.async_scheduling)
    block_size = vllm_config.cache_config.block_size
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv_cache_config = KVCacheConfig(
        num_blocks=vllm_config.cache_config.num_gpu_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    _register_kv_cache_specs(vllm_config)
    with _runner_choice(use_v2_model_runner):
        scheduler = cls(
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=block_size,
            mm_registry=FixedItemSizeRegistry(max_item_embeds),
            log_stats=log_stats,
        )
    assert scheduler.use_v2_model_runner is use_v2_model_runner
    return scheduler


def _stock_scheduler_cls(async_scheduling: bool) -> type[Scheduler]:
    if not async_scheduling:
        return Scheduler
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    return AsyncScheduler


def _register_kv_cache_specs(vllm_config: Any) -> None:
    """Fill the registry in which newer versions look up the manager of a KV cache spec, as the engine core does."""
    try:
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    except ImportError:
        return
    register_all_kvcache_specs(vllm_config)


@contextmanager
def _runner_choice(use_v2_model_runner: bool) -> Iterator[None]:
    """Set the variable that the read-only property `VllmConfig.use_v2_model_runner` follows."""
    name = "VLLM_USE_V2_MODEL_RUNNER"
    before = os.environ.get(name)
    os.environ[name] = str(int(use_v2_model_runner))
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

"""Build a complete `VllmConfig` for a scheduler alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vllm.config import CacheConfig, DeviceConfig, KVEventsConfig, SchedulerConfig, VllmConfig

from vllm_omni_sched.testing.model import make_model_config


def make_vllm_config(
    *,
    async_scheduling: bool = True,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 16,
    max_model_len: int = 1 << 20,
    num_blocks: int = 10_000,
    block_size: int = 16,
    encoder_budget: int | None = None,
    encoder_cache_size: int | None = None,
    enable_prefix_caching: bool = False,
    disable_chunked_mm_input: bool = False,
    long_prefill_token_threshold: int = 0,
    kv_events: bool = False,
    multimodal: bool = True,
    uses_mrope: bool = False,
    policy: str = "fcfs",
    encoder_cache_manager_cls: str | None = None,
    ec_transfer_config: Any = None,
    options: Mapping[str, Any] | None = None,
) -> VllmConfig:
    """Return the config that `make_scheduler` builds from.

    `encoder_budget` (encoder embeddings per step) and `encoder_cache_size` (embeddings) default to
    `max_num_batched_tokens`, as in vLLM. `ec_transfer_config` is the operator's. `options` becomes
    `additional_config["omni_sched"]`; None leaves it out. KV events, if on, are recorded but not published. Raises
    `ValueError` for an `encoder_cache_manager_cls` on a vLLM that has no such option.
    """
    scheduler_config = SchedulerConfig(
        max_num_seqs=min(max_num_seqs, max_num_batched_tokens),
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        disable_chunked_mm_input=disable_chunked_mm_input,
        long_prefill_token_threshold=long_prefill_token_threshold,
        policy=policy,
        **_if_field(SchedulerConfig, watermark=0.0, async_scheduling=async_scheduling),
    )
    extra: dict[str, Any] = {}
    if encoder_cache_manager_cls is not None:
        extra |= {"ec_manager_config": _cache_manager_config(encoder_cache_manager_cls)}
    config = VllmConfig(
        scheduler_config=scheduler_config,
        cache_config=CacheConfig(
            block_size=block_size, cache_dtype="auto", enable_prefix_caching=enable_prefix_caching
        ),
        device_config=DeviceConfig("cpu"),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if kv_events else None,
        additional_config={} if options is None else {"omni_sched": dict(options)},
        **extra,
    )
    # Set only now: given a model, VllmConfig would check it against the platform, and a platform may overrule the
    # requested values.
    config.model_config = make_model_config(max_model_len=max_model_len, multimodal=multimodal, uses_mrope=uses_mrope)
    config.scheduler_config.async_scheduling = async_scheduling
    config.cache_config.block_size = block_size
    config.cache_config.enable_prefix_caching = enable_prefix_caching
    config.cache_config.num_gpu_blocks = num_blocks
    if encoder_budget is not None:
        config.scheduler_config.max_num_encoder_input_tokens = encoder_budget
    if encoder_cache_size is not None:
        config.scheduler_config.encoder_cache_size = encoder_cache_size
    config.ec_transfer_config = ec_transfer_config
    if options is not None:
        from vllm_omni_sched.engine.fitted import engine_options
        from vllm_omni_sched.engine.start import attach_encode_ahead

        if engine_options(config).encode_ahead:
            attach_encode_ahead(config)  # as the front end does
    return config


def _if_field(config_cls: type, **values: Any) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(config_cls)}
    return {name: value for name, value in values.items() if name in known}


def _cache_manager_config(class_path: str) -> Any:
    try:
        from vllm.config.ec_manager_config import EncoderCacheManagerConfig
    except ImportError:
        raise ValueError("this vLLM has no --ec-manager-config; it appeared in 0.28") from None
    return EncoderCacheManagerConfig(encoder_cache_manager_cls=class_path)

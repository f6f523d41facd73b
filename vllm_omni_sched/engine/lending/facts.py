"""Whether a real engine may lend KV blocks to encodes, and the sizes that the policy needs."""

from typing import Any

from vllm_omni_sched.config.options import OmniSchedConfig
from vllm_omni_sched.core.engine.requests import LendingFacts
from vllm_omni_sched.engine.lending.pages import sure_bytes
from vllm_omni_sched.resource.engine.lending import LendingEngine, refuse_lending


def lending_engine(config: OmniSchedConfig, vllm_config: Any) -> LendingEngine:
    """Read the facts from vLLM's configuration that decide whether this engine may lend."""
    multimodal = vllm_config.model_config.multimodal_config
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    return LendingEngine(
        device=vllm_config.device_config.device_type,
        encode_ahead=config.encode_ahead,
        workers=parallel.tensor_parallel_size,
        stages=parallel.world_size // parallel.tensor_parallel_size,
        runner_v2=bool(getattr(vllm_config, "use_v2_model_runner", False)),
        kv_connector=(transfer.kv_connector or "") if transfer is not None else "",
        takes_embeddings=bool(getattr(multimodal, "enable_mm_embeds", False)),
        shared_items=getattr(multimodal, "mm_processor_cache_type", None) == "shm",
        bytes_per_embed=config.encode_bytes_per_embed,
    )


def lending_facts(config: OmniSchedConfig, scheduler: Any) -> LendingFacts | None:
    """Return the memory that a scheduler may lend; None without `kv_lending`.

    Raises:
        ConfigError: this engine cannot lend.
    """
    if not config.kv_lending:
        return None
    engine = lending_engine(config, scheduler.vllm_config)
    groups = scheduler.kv_cache_config.kv_cache_groups
    of_block = sum(
        len(group.layer_names) * sure_bytes(getattr(group.kv_cache_spec, "page_size_bytes", 0)) for group in groups
    )
    refuse_lending(config.kv_lending, engine._replace(kv_groups=len(groups), block_bytes=of_block))
    return LendingFacts(
        scheduler.kv_cache_config.num_blocks - 1,  # without the null block
        scheduler.block_size,
        config.encoder_reserve_embeds or scheduler.max_num_scheduled_tokens,
        of_block / config.encode_bytes_per_embed,
        1 + scheduler.num_spec_tokens,
        -(-scheduler.max_model_len // scheduler.block_size),
    )

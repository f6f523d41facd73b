"""Which of vLLM's own tests judge us, in which guise, and what cannot apply."""

from __future__ import annotations

from dataclasses import dataclass

CORE = "tests/v1/core"
KV = "tests/v1/kv_connector/unit"

CACHE_TESTS = f"{CORE}/test_encoder_cache_manager.py"

# Everything that plans multimodal items, and the runners' half of it.
ITEM_FILES = (
    f"{CORE}/test_scheduler.py",
    f"{CORE}/test_async_scheduler.py",
    CACHE_TESTS,
    "tests/v1/streaming_input/test_scheduler_streaming.py",
    "tests/v1/streaming_input/test_gpu_model_runner_v2_streaming.py",
    "tests/v1/worker/test_encoder_runner.py",
    "tests/v1/worker/test_gpu_model_runner_mm_gather.py",
)

# Tests that build a scheduler for something else: preemption, prefix caching, KV connectors, speculative decoding.
SCHEDULER_FILES = (
    f"{CORE}/test_priority_scheduler_random.py",
    f"{CORE}/test_priority_preemption_bug.py",
    f"{CORE}/test_deferred_block_free.py",
    f"{CORE}/test_worker_slot_overflow.py",
    f"{CORE}/test_swa_inflight_window_free.py",
    f"{CORE}/test_mamba_align_chunk_split.py",
    f"{CORE}/test_output.py",
    f"{CORE}/test_prefix_caching.py",
    f"{CORE}/test_prefix_replay.py",
    f"{CORE}/prefix_cache/test_partial_prefix_cache_hits.py",
    f"{CORE}/prefix_cache/test_mamba_eagle_resume_checkpoint.py",
    "tests/v1/ec_connector/unit/test_ec_transfer_params.py",
    f"{KV}/test_error_propagation.py",
    f"{KV}/test_invalid_blocks_correctness.py",
    f"{KV}/test_kv_load_failure_recovery.py",
    f"{KV}/test_remote_decode_lifecycle.py",
    f"{KV}/test_remote_prefill_lifecycle.py",
    f"{KV}/test_cache_pollution_prevention.py",
    f"{KV}/test_scheduler_kv_connector_override.py",
    f"{KV}/test_decode_bench_connector.py",
    "tests/v1/spec_decode/test_dynamic_sd.py",
    "tests/v1/worker/test_gpu_model_runner.py",
)

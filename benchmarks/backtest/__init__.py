"""Predict traces with calibrated costs, then serve them with a real server over HTTP: how far off was it?"""

from __future__ import annotations

import json
from typing import Any

BARS = {"P50": 0.10, "P99": 0.20}
"""Largest relative error of a prediction."""

MODEL = {"image_size": 336, "tower_layers": 4, "tower_hidden": 384, "tower_heads": 6, "llm_layers": 16}
"""Sizes of the tiny LLaVA: a step takes 4 ms on a core, an image of 576 embeddings 0.1 s."""
EMBEDS = 576  # of an image
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "limit_mm_per_prompt": {"image": 9},
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0,
    "gpu_memory_utilization": 0.3,
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    # The worker is part of the engine core. Otherwise the engine core polls for the end of each step: with the worker
    # and the API server, three processes want two cores, and how long a step takes depends on where they happen to be.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",  # as vLLM sets it for a worker of its own on two cores
}

POLICY: dict[str, dict[str, Any]] = {"stock": {"profile": "exact"}, "ours": {"profile": "chat"}}
"""Options of the simulated scheduler by variant; with `exact` it schedules as stock does."""
VARIANTS: dict[str, list[str]] = {
    "stock": [],
    "ours": [
        *("--scheduler-cls", "vllm_omni_sched.OmniScheduler"),
        *("--additional-config", json.dumps({"omni_sched": POLICY["ours"]})),
    ],
}
"""Arguments of `vllm serve` by variant."""

SLO = {"ttft_seconds": 0.3, "itl_seconds": 0.08}
WARM_UP_SECONDS = 5.0
QUIET_CORES = 0.35
"""A replay during which other processes had more is disturbed: it is repeated once."""
SIMULATIONS = 9  # of each trace, with unlike draws of the variation of steps

"""Serve what the clients of others send, vLLM's own or AIPerf: real servers, stock and ours in one run."""

from __future__ import annotations

import json

ONE_PICTURE = ["--max-num-batched-tokens", "640"]
"""A step has room for the 577 embeddings of one picture, so that it never encodes several."""

VARIANTS: dict[str, list[str]] = {
    "stock": [],
    "stock one picture a step": ONE_PICTURE,
    "ours": [
        "--scheduler-cls",
        "vllm_omni_sched.OmniScheduler",
        "--additional-config",
        json.dumps({"omni_sched": "chat"}),
    ],
    "exact": ["--scheduler-cls", "vllm_omni_sched.OmniScheduler"],
}
"""Arguments of `vllm serve` by variant."""

"""Text, images and frames on one engine, arriving as they like: do tokens go on while pictures are encoded?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OURS: dict[str, Any] = {"profile": "chat"}

VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "stock on all cores": None,
    "ours": OURS,
    "exact": {},
    "realtime": {"profile": "realtime"},
    "video": {"profile": "video"},
    # what an offline batch could have
    "batch ahead": {
        "encode_ahead": True,
        "encoder_cache_host_bytes": 1 << 28,
        "expert": {"decode_pace": 0.0},
    },
    "batch rounds": {"encode_rounds": True},
    # each mechanism off in turn, or another one on
    "no lane": {**OURS, "encode_ahead": False},
    "no pace": {**OURS, "decode_pace": 0.0},
    "on LLM's cores": {**OURS, "encode_lane_cpus": "shared"},
    "by arrival": {**OURS, "waiting_order": "arrival"},
    "prompts unbounded": {**OURS, "prefill_control": "off"},
    "prefill PID": {**OURS, "prefill_control": "pid"},
    "batch PID": {**OURS, "batch_control": "pid"},
    "pieces": {**OURS, "pieces": True},
}
"""Our options of each variant; None is stock vLLM without the plugin."""


def environment_of(variant: str, cpus: Sequence[int]) -> dict[str, str]:
    """Return the environment of a variant's engine, on a machine with these processors.

    vLLM leaves one core to its scheduler and front end, unless its threads are bound by hand.
    """
    found = {"VLLM_PLUGINS": ""} if VARIANTS[variant] is None else {}
    if variant == "stock on all cores":
        found["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
    return found

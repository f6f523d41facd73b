"""The line with which an engine says that our scheduler works in it, and what of it does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_sched import __version__, compat
from vllm_omni_sched.compat import Status
from vllm_omni_sched.config import OmniSchedConfig, resolved


def start_line(scheduler: Any, config: OmniSchedConfig, features: Mapping[str, Status]) -> str:
    """Return one line: version, scheduler, options that were given, and which features are on or, with why, off.

    Args:
        scheduler: one of ours, set up.
        features: which features are active, as far as this vLLM goes.
    """
    cls = type(scheduler)
    stage = getattr(scheduler.vllm_config.model_config, "stage_id", None)
    whose = "this engine" if stage is None else f"stage {stage}"
    given = [str(one) for one in resolved(config) if one.given]
    idle = _idle(scheduler)
    on = [name for name, status in features.items() if status.active and name not in idle]
    off = [
        f"{name} ({status.reason if not status.active else idle[name]})"
        for name, status in features.items()
        if name not in on
    ]
    return (
        f"vllm-omni-sched {__version__} schedules {whose}: {cls.__module__}.{cls.__qualname__} on vLLM "
        f"{compat.vllm_version()}. Options given: {', '.join(given) or 'none'}. "
        f"Features on: {', '.join(on) or 'none'}; off: {', '.join(off) or 'none'}."
    )


def _idle(scheduler: Any) -> dict[str, str]:
    """Features that this vLLM has points for and this engine has no use for, and why."""
    why = {}
    if scheduler.is_encoder_decoder:
        why["windows"] = why["pending_range"] = "an encoder-decoder model has one item"
    elif not scheduler._omni_runner_v2:
        why["pending_range"] = "for model runner V2 only"
    if scheduler._omni_sender is None:
        why["session_delta"] = "the workers of this platform do not take deltas"
        why["mrope_append"] = "needs session_delta"
    elif not scheduler.vllm_config.model_config.uses_mrope:
        why["mrope_append"] = "this model has no M-RoPE positions"
    return why

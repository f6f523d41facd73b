"""The log line that reports our scheduler's version, options and active features at start-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_omni_sched import __version__, compat
from vllm_omni_sched.compat import Status
from vllm_omni_sched.config import OmniSchedConfig, resolved


def start_line(scheduler: Any, config: OmniSchedConfig, features: Mapping[str, Status]) -> str:
    """Return one line: version, scheduler, given options, features that are on, and features that are off, with
    reasons.

    Args:
        scheduler: one of our schedulers, after its setup.
        features: status of each feature with this version of vLLM.
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
    """Return the features that this vLLM supports and this engine does not use, with the reasons."""
    why = {}
    if scheduler.is_encoder_decoder:
        why["windows"] = why["pending_range"] = "an encoder-decoder model has one item"
    elif not getattr(scheduler, "use_v2_model_runner", False):
        why["pending_range"] = "for model runner V2 only"
    if scheduler.omni.sessions.sender is None:
        why["session_delta"] = "the workers of this platform do not take deltas"
        why["mrope_append"] = "needs session_delta"
    elif not scheduler.vllm_config.model_config.uses_mrope:
        why["mrope_append"] = "this model has no M-RoPE positions"
    return why

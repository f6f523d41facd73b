"""Make the controller of a limit from the mode that an option names."""

from vllm_omni_sched.config.options import ControlMode, OmniSchedConfig
from vllm_omni_sched.resource.batch_size import BatchControl
from vllm_omni_sched.resource.engine.prefill_budget import AdaptivePrefill
from vllm_omni_sched.resource.pid import PidBatch


def make_control(mode: ControlMode, config: OmniSchedConfig, minimum: int, maximum: int) -> BatchControl | None:
    """Return the controller for ``mode``; None for ``off``."""
    target, interval = config.control_target_ms / 1e3, config.control_interval_ms / 1e3
    minimum = min(minimum, maximum)
    if mode is ControlMode.PID:
        return PidBatch(target, interval, minimum, maximum)
    if mode is ControlMode.ADAPTIVE:
        return AdaptivePrefill(target, minimum, maximum)
    return None

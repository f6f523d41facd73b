"""Derive the bounds of recovery from the operator's options."""

import math

from vllm_omni_sched import stage_options
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions

DEAD_FOR_SURE = 60.0  # seconds; a suspected replica is reported dead long before


def recovery_options(chosen: stage_options.RecoveryOptions) -> RecoveryOptions:
    """Return the options of the recovery policy.

    A restart has no time limit here: whoever restarts has one, and two starts at once would share a device.
    """
    return RecoveryOptions(
        restart=chosen.restart and chosen.max_restarts > 0,
        max_restarts=max(chosen.max_restarts, 1),
        window_seconds=chosen.window_seconds,
        max_redispatches=chosen.max_redispatches,
        max_wait_seconds=max(chosen.max_wait_seconds, 1e-3),
        suspect_seconds=DEAD_FOR_SURE + (chosen.hang_seconds or 0.0),
        restart_timeout_seconds=math.inf,
    )

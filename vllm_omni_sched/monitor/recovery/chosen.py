"""The bounds of recovery as the operator has chosen them."""

import math

from vllm_omni_sched import stage_options
from vllm_omni_sched.monitor.recovery.options import RecoveryOptions

DEAD_FOR_SURE = 60.0  # seconds; what is suspected has died, and is said to be dead long before


def recovery_options(chosen: stage_options.RecoveryOptions) -> RecoveryOptions:
    """Those of the policy.

    A restart has no time limit of its own here: who restarts has one, and two starts at once would share a device.
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

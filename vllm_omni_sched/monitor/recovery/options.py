"""Define the bounds of recovery, and derive them from the operator's options."""

from dataclasses import dataclass

from vllm_omni_sched.config import stage_options


@dataclass(frozen=True)
class RecoveryOptions:
    """Bounds of recovery; times in seconds.

    ``max_restarts``: most attempts within ``window_seconds``; then the circuit opens until the oldest is that long ago.
    ``max_redispatches``: of one request, over its whole life.
    ``poison_deaths``: a request in flight at so many deaths in a row fails.
    ``last_chance_together``: most requests on one replica that would fail at its next death.
    ``max_wait_seconds``: longest wait for a replica, each time.
    ``backoff_seconds``: before the second attempt; doubles up to ``max_backoff_seconds``, each time with jitter
    between half of it and all of it. ``history``: incidents that are kept.
    """

    restart: bool = True
    max_restarts: int = 3
    window_seconds: float = 300.0
    max_redispatches: int = 2
    poison_deaths: int = 3
    last_chance_together: int = 4
    max_wait_seconds: float = 60.0
    backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0
    history: int = 1024


def recovery_options(chosen: stage_options.RecoveryOptions) -> RecoveryOptions:
    """Return the options of the recovery policy."""
    return RecoveryOptions(
        restart=chosen.restart,
        max_restarts=chosen.max_restarts,
        window_seconds=chosen.window_seconds,
        max_redispatches=chosen.max_redispatches,
        max_wait_seconds=max(chosen.max_wait_seconds, 1e-3),
    )

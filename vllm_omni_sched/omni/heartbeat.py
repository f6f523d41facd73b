"""Set how often a stage tells vLLM-Omni's coordinator that it lives: vLLM-Omni 0.30 has no option for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from vllm_omni_sched.config.errors import ConfigError

VARIABLE = "VLLM_OMNI_SCHED_HEARTBEAT_SECONDS"
STOCK_SECONDS = 5.0  # between two heartbeats of vLLM-Omni
MISSED = 2  # heartbeats that may be late before a replica counts as silent
CLIENT = "vllm_omni.distributed.omni_coordinator.omni_coord_client_for_stage"


def heartbeat_seconds(environ: Mapping[str, str]) -> float:
    """Return the time between two heartbeats of the stages of this host.

    Raises:
        ConfigError: the environment variable is not a time from 0.05 to 60 seconds.
    """
    given = environ.get(VARIABLE)
    if given is None:
        return STOCK_SECONDS
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 60:
        raise ConfigError(f"{VARIABLE} must be a number of seconds from 0.05 to 60, such as 0.5; it is {given!r}")
    return seconds


def hook() -> None:
    """Let the stages that run in this process send heartbeats as the environment variable says; unset: as stock."""
    if VARIABLE not in os.environ:
        return
    seconds = heartbeat_seconds(os.environ)

    def keep(client: Any, value: float) -> None:
        """Ignore the constant that the constructor sets."""

    sys.modules[CLIENT].OmniCoordClientForStage._heartbeat_interval = property(lambda client: seconds, keep)


def check_timeout(runtime: Any, environ: Mapping[str, str]) -> None:
    """Refuse a time-out of vLLM-Omni that passes between heartbeats: replicas would be lost though they live.

    Args:
        runtime: vLLM-Omni's `StageRuntime`; if it runs stages on one host, there is no time-out.

    Raises:
        ConfigError: the time-out is too short.
    """
    timeout = getattr(runtime, "_omni_heartbeat_timeout", None)
    seconds = heartbeat_seconds(environ)
    if timeout is not None and timeout < MISSED * seconds:
        raise ConfigError(
            f"--omni-heartbeat-timeout is {timeout:g} s, and the stages of this host send a heartbeat every "
            f"{seconds:g} s: replicas would count as dead though they live; raise it to {MISSED * seconds:g} s or "
            f"more, or set {VARIABLE} on all hosts to {timeout / MISSED:g} or less"
        )

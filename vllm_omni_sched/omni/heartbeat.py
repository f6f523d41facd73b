"""Set how often a stage tells vLLM-Omni's coordinator that it lives, and how soon its silence is noticed.

vLLM-Omni 0.30 has no option for either. With heartbeats of a quarter of a second, a time-out of a second would pass
unnoticed for up to another second and a half: the coordinator looks for silent replicas once a second at most, and the
front end looks at the coordinator's list twice a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.imports import wrap_once

VARIABLE = "VLLM_OMNI_SCHED_HEARTBEAT_SECONDS"
STOCK_SECONDS = 5.0  # between two heartbeats of vLLM-Omni
MISSED = 2  # heartbeats that may be late before a replica counts as silent
WATCH_SECONDS = 0.5  # between two looks of vLLM-Omni's front end at the list of the coordinator
CLIENT = "vllm_omni.distributed.omni_coordinator.omni_coord_client_for_stage"
COORDINATOR = "vllm_omni.distributed.omni_coordinator.omni_coordinator"
MEMBERSHIP = "vllm_omni.engine.membership_controller"


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


def hook_coordinator() -> None:
    """Let the coordinator look for silent replicas whenever it has heard all others; unset: once a second, as stock."""
    if VARIABLE not in os.environ:
        return

    def wrap(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def handle_event(self: Any, event: Any) -> None:
            original(self, event)
            if not self._router.poll(0):  # else heartbeats that wait to be read would count as missed
                self._check_heartbeat_timeouts()

        return handle_event

    wrap_once(sys.modules[COORDINATOR].OmniCoordinator, "_handle_event", wrap)


def hook_membership() -> None:
    """Let the front end look at the list of the coordinator once per heartbeat; without the variable: as stock."""
    if VARIABLE in os.environ:
        seconds = min(WATCH_SECONDS, heartbeat_seconds(os.environ))
        sys.modules[MEMBERSHIP].MembershipController.WATCH_INTERVAL_S = seconds


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

"""Makes our connectors known to vLLM-Omni, in every process that loads its plugins."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from typing import Any

from vllm_omni_sched.connectors.arena.meeting import ARENA_VARIABLE
from vllm_omni_sched.engine.metrics_bridge import attach
from vllm_omni_sched.omni.stages import report
from vllm_omni_sched.omni.stages.seam import hook


def register_connectors() -> None:
    """Register by name, and hook what schedules stages; nothing is made before a config asks for it. Twice is fine."""
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

    known = OmniConnectorFactory.list_registered_connectors()
    for name, make in CONNECTORS.items():
        if name not in known:
            OmniConnectorFactory.register_connector(name, make)
    hook()
    report.begin()  # in the process of a stage that was asked to
    attach()  # for what stages will tell
    # stages inherit it from the process that starts them, and so meet in one arena
    os.environ.setdefault(ARENA_VARIABLE, f"run-{secrets.token_hex(8)}")


def _arena(config: dict[str, Any]) -> Any:
    from vllm_omni_sched.omni.arena_connector import ArenaConnector

    return ArenaConnector(config)


def _auto(config: dict[str, Any]) -> Any:
    from vllm_omni_sched.omni.auto_connector import OmniAutoConnector

    return OmniAutoConnector(config)


def _cuda_ipc(config: dict[str, Any]) -> Any:
    from vllm_omni_sched.omni.cuda_ipc_connector import CudaIpcConnector

    return CudaIpcConnector(config)


def _mooncake(config: dict[str, Any]) -> Any:
    from vllm_omni_sched.omni.mooncake_connector import MooncakePoolConnector

    return MooncakePoolConnector(config)


CONNECTORS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ArenaConnector": _arena,
    "CudaIpcConnector": _cuda_ipc,
    "MooncakePoolConnector": _mooncake,
    "OmniAutoConnector": _auto,
}

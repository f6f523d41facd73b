"""Makes our connectors known to vLLM-Omni's factory by name, whichever of both is imported first.

Nothing of vLLM-Omni is imported for it, and a connector's own module not before somebody makes one.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from vllm_omni_sched.imports import when_imported

FACTORY = "vllm_omni.distributed.omni_connectors.factory"
ARENA_VARIABLE = "VLLM_OMNI_SCHED_ARENA"
"""Environment variable with the name of the arena, set by the process that starts the stages."""


def _make(module: str, name: str, config: dict[str, Any]) -> Any:
    return getattr(import_module(f"vllm_omni_sched.omni.{module}"), name)(config)


CONNECTORS: dict[str, Callable[[dict[str, Any]], Any]] = {
    name: partial(_make, module, name)
    for name, module in {
        "ArenaConnector": "connector",
        "CudaIpcConnector": "connector",
        "MooncakePoolConnector": "connector",
        "OmniAutoConnector": "connector",
        "OmniBranchConnector": "branch_connector",
    }.items()
}


def offer() -> None:
    """Have them registered once there is a factory; twice is fine."""
    when_imported(FACTORY, register_names)


def register_names() -> None:
    """Register them with the factory, which is imported."""
    factory = sys.modules[FACTORY].OmniConnectorFactory
    known = factory.list_registered_connectors()
    for name, make in CONNECTORS.items():
        if name not in known:
            factory.register_connector(name, make)
    # stages inherit it from the process that starts them, and so meet in one arena
    os.environ.setdefault(ARENA_VARIABLE, f"run-{secrets.token_hex(8)}")

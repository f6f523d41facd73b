"""Names that a scenario may use, as those who own them list them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Known:
    """What there are costs and workloads for.

    ``workloads``: the options of each kind, with ``rate`` among them. ``make_workload(table, where, folder)`` makes one
    of a ``[workload]`` table, and raises `ConfigError` where it cannot; ``where`` is for messages, files are named from
    ``folder``. ``video_kinds``: workloads whose requests bring videos that have to be decoded.
    """

    devices: Collection[str]
    models: Collection[str]
    workloads: Mapping[str, type[BaseModel]]
    make_workload: Callable[[Mapping[str, Any], str, Path], object]
    video_kinds: Collection[str] = ("video-clips",)


def installed() -> Known:
    """What this package has."""
    hardware, models, workloads = (
        import_module(f"vllm_omni_sched.sim.{name}")
        for name in ("costs.hardware", "costs.models", "workloads.registry")
    )
    return Known(tuple(hardware.DEVICES), tuple(models.MODELS), workloads.KINDS, workloads.build)

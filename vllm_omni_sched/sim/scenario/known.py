"""List the names that a scenario may use, as their owners define them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel


@dataclass(frozen=True)
class Known:
    """Names for which there are costs and workloads.

    ``workloads``: the options of each kind, with ``rate`` among them. ``make_workload(table, where, folder)`` makes one
    of a ``[workload]`` table, and raises `ConfigError` where it cannot; ``where`` is for messages, files are named from
    ``folder``. ``video_kinds``: workloads whose requests bring videos that must be decoded. ``video_engines``: number
    of video engines of a GPU, by device.
    """

    devices: Collection[str]
    models: Collection[str]
    workloads: Mapping[str, type[BaseModel]]
    make_workload: Callable[[Mapping[str, Any], str, Path], object]
    video_kinds: Collection[str] = ("video-clips",)
    video_engines: Mapping[str, int] = field(default_factory=dict)


def installed() -> Known:
    """Return the names that this package has."""
    # not above: these modules need numpy
    from vllm_omni_sched.sim.costs.hardware import DEVICES
    from vllm_omni_sched.sim.costs.models import MODELS
    from vllm_omni_sched.sim.workloads.registry import KINDS, build

    engines = {name: kind.nvdec_engines for name, kind in DEVICES.items()}
    return Known(tuple(DEVICES), tuple(MODELS), KINDS, build, video_engines=engines)

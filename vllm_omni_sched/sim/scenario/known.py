"""Names that a scenario may use, as those who own them list them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Known:
    """What there are costs and workloads for.

    ``check_workload(kind, options, where)`` raises `ConfigError` where a workload cannot have those further keys;
    ``video_kinds``: workloads whose requests all bring videos that have to be decoded.
    """

    devices: Collection[str]
    models: Collection[str]
    workloads: Collection[str]
    check_workload: Callable[[str, Mapping[str, Any], str], None]
    video_kinds: Collection[str] = ("video-clips",)


def installed() -> Known:
    """What this package has."""
    from vllm_omni_sched.sim.costs.hardware import DEVICES
    from vllm_omni_sched.sim.costs.models import MODELS
    from vllm_omni_sched.sim.workloads.registry import KINDS, build

    def check(kind: str, options: Mapping[str, Any], where: str) -> None:
        build({"kind": kind, **options}, where)

    return Known(tuple(DEVICES), tuple(MODELS), tuple(KINDS), check)

"""Define a scenario: a TOML file, typed, and checked before anything runs."""

from vllm_omni_sched.sim.scenario.cluster import Autoscale, ClassTargets, Cluster, Failures, Slo
from vllm_omni_sched.sim.scenario.loader import KnownNames, Source, build, installed, load, read_source, read_toml
from vllm_omni_sched.sim.scenario.overrides import apply, flatten
from vllm_omni_sched.sim.scenario.scenario import Scenario, Workload
from vllm_omni_sched.sim.scenario.stages import (
    Deterministic,
    DeviceStage,
    EncoderStage,
    EngineStage,
    Exponential,
    Hyperexponential,
    Link,
    Seconds,
    ServersStage,
    Stage,
    Steps,
    VideoStage,
)

__all__ = [
    "Autoscale",
    "ClassTargets",
    "Cluster",
    "Deterministic",
    "DeviceStage",
    "EncoderStage",
    "EngineStage",
    "Exponential",
    "Failures",
    "Hyperexponential",
    "KnownNames",
    "Link",
    "Scenario",
    "Seconds",
    "ServersStage",
    "Slo",
    "Source",
    "Stage",
    "Steps",
    "VideoStage",
    "Workload",
    "apply",
    "build",
    "flatten",
    "installed",
    "load",
    "read_source",
    "read_toml",
]

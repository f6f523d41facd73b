"""Define the properties of a stage."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.graph.stages import StageKind
from vllm_omni_sched.sim.work import Request


@dataclass(frozen=True)
class StageSpec:
    """Defines a stage and its replicas.

    ``at_once``: requests that a replica can run at a time. ``startup_seconds``: of a replica that is added.
    ``devices``: of each replica. ``work``: adapts a request to the stage; None: it is used as it is.

    Raises:
        ConfigError: a number is out of its range.
    """

    name: str
    kind: StageKind = StageKind.GENERATION
    replicas: int = 1
    at_once: int = 256
    startup_seconds: float = 0.0
    devices: int = 1
    work: Callable[[Request], Request] | None = None

    def __post_init__(self) -> None:
        for name in ("replicas", "at_once", "devices"):
            if getattr(self, name) < 1:
                raise ConfigError(f"stage {self.name}: {name} must be 1 or more, got {getattr(self, name)}")
        if not 0 <= self.startup_seconds < float("inf"):
            raise ConfigError(f"stage {self.name}: startup_seconds must be 0 or more, got {self.startup_seconds}")

"""Let replicas die by schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.config.errors import ConfigError
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.pool import Pool


@dataclass(frozen=True)
class FailureSpec:
    """Describes the deaths in one stage.

    ``every_seconds``: mean time between two deaths of a Poisson process; ``at_seconds``: or these times.
    ``rack``: number of replicas with neighbouring indices that die together; 1: single ones.
    ``restart_seconds``: time to restart each, once requested; ``detection_seconds``: until a death is noticed.

    Raises:
        ConfigError: a number is out of its range, or there is not one of ``every_seconds`` and ``at_seconds``.
    """

    stage: int
    every_seconds: float | None = None
    at_seconds: tuple[float, ...] = ()
    rack: int = 1
    restart_seconds: float = 60.0
    detection_seconds: float = 1.0

    def __post_init__(self) -> None:
        if (self.every_seconds is None) == (not self.at_seconds):
            raise ConfigError(f"failures of stage {self.stage}: give one of every_seconds and at_seconds")
        if self.every_seconds is not None and not 0 < self.every_seconds < math.inf:
            raise ConfigError(f"failures of stage {self.stage}: every_seconds must be above 0")
        if self.rack < 1:
            raise ConfigError(f"failures of stage {self.stage}: rack must be 1 or more, got {self.rack}")
        for name in ("restart_seconds", "detection_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"failures of stage {self.stage}: {name} must be 0 or more")
        if not all(0 <= when < math.inf for when in self.at_seconds):
            raise ConfigError(f"failures of stage {self.stage}: at_seconds must be 0 or more")


class Failures:
    """Kills replicas by the schedule: one of the live ones, with equal probability, and its rack.

    Args:
        noticed: called for each dead replica when its death is noticed.
        goes_on: returns whether the simulation still has requests.
    """

    def __init__(
        self,
        sim: Simulator,
        pool: Pool,
        spec: FailureSpec,
        rng: Random,
        noticed: Callable[[Pool, int, float], None],
        goes_on: Callable[[], bool],
    ) -> None:
        self._sim, self._pool, self._spec, self._rng = sim, pool, spec, rng
        self._noticed, self._goes_on = noticed, goes_on
        self.deaths = 0
        for when in spec.at_seconds:
            sim.at(when, self._strike)
        self._next()

    def _next(self) -> None:
        if self._spec.every_seconds is not None:
            self._sim.after(self._rng.expovariate(1 / self._spec.every_seconds), self._strike_again)

    def _strike_again(self, _: None) -> None:
        if self._goes_on():
            self._strike(None)
            self._next()

    def _strike(self, _: None) -> None:
        alive = [one.index for one in self._pool.replicas.values() if one.server is not None]
        if not alive or not self._goes_on():
            return
        rack = self._rng.choice(alive) // self._spec.rack
        for index in alive:
            if index // self._spec.rack == rack and self._pool.kill(index):
                self.deaths += 1
                self._sim.after(self._spec.detection_seconds, self._notice, index)

    def _notice(self, index: int) -> None:
        self._noticed(self._pool, index, self._spec.restart_seconds)

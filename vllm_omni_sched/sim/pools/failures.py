"""Let replicas die by schedule."""

from collections.abc import Callable
from random import Random  # noqa: TID251 (the type of an argument)

from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.pools.pool import Pool
from vllm_omni_sched.sim.scenario import scenario


class Failures:
    """Kills replicas by the schedule: one of the live ones, with equal probability, and its rack.

    Args:
        options: times of deaths, by a Poisson process or as given, the size of a rack, and the times until a death is
            noticed and a replica is restarted.
        noticed: called for each dead replica when its death is noticed.
        goes_on: returns whether the simulation still has requests.
    """

    def __init__(
        self,
        sim: Simulator,
        pool: Pool,
        options: scenario.Failures,
        rng: Random,
        noticed: Callable[[Pool, int, float], None],
        goes_on: Callable[[], bool],
    ) -> None:
        self._sim, self._pool, self._options, self._rng = sim, pool, options, rng
        self._rack = options.rack_replicas if options.kind == "rack" else 1
        self._noticed, self._goes_on = noticed, goes_on
        self.deaths = 0
        for when in options.at_seconds:
            sim.at(when, self._strike)
        self._next()

    def _next(self) -> None:
        if self._options.every_seconds is not None:
            self._sim.after(self._rng.expovariate(1 / self._options.every_seconds), self._strike_again)

    def _strike_again(self, _: None) -> None:
        if self._goes_on():
            self._strike(None)
            self._next()

    def _strike(self, _: None) -> None:
        alive = [one.index for one in self._pool.replicas.values() if one.server is not None]
        if not alive or not self._goes_on():
            return
        rack = self._rng.choice(alive) // self._rack
        for index in alive:
            if index // self._rack == rack and self._pool.kill(index):
                self.deaths += 1
                self._sim.after(self._options.detection_seconds, self._notice, index)

    def _notice(self, index: int) -> None:
        self._noticed(self._pool, index, self._options.restart_seconds)

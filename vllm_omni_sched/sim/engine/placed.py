"""Simulate an engine on a device that other stages share."""

from vllm_omni_sched.core.engine.core import EngineCore
from vllm_omni_sched.sim.costs.base import EngineCosts
from vllm_omni_sched.sim.costs.slowed import SlowedCosts
from vllm_omni_sched.sim.device import DeviceShare
from vllm_omni_sched.sim.engine.limits import EngineLimits
from vllm_omni_sched.sim.engine.server import EngineServer
from vllm_omni_sched.sim.engine.steps import Watcher
from vllm_omni_sched.sim.kernel import Simulator
from vllm_omni_sched.sim.measure import Histogram
from vllm_omni_sched.sim.server import Done, Job


class PlacedEngine(EngineServer):
    """Models an engine whose steps take their time on a shared device; the front end is not slowed down.

    A step counts as busy when it begins.
    """

    __slots__ = ("_share",)

    def __init__(
        self,
        sim: Simulator,
        costs: EngineCosts,
        limits: EngineLimits,
        core: EngineCore,
        done: Done,
        itl: Histogram,
        share: DeviceShare,
        watcher: Watcher | None = None,
        on_first_output: Done | None = None,
    ) -> None:
        costs = costs if share.speed == 1.0 else SlowedCosts(costs, share.speed)
        super().__init__(sim, costs, limits, core, done, itl, watcher, on_first_output)
        self._share = share
        self._run = share.run

    def kill(self) -> list[Job]:
        """Kill the engine and return its jobs."""
        self._share.stop()
        return super().kill()

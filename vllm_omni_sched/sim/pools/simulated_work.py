"""Represent the work of a simulated request as the pipeline core knows it."""

from dataclasses import dataclass

from vllm_omni_sched.core.pipeline.requests import StageWork
from vllm_omni_sched.sim.pools.request_run import RequestRun, StageRun


@dataclass(eq=False, kw_only=True)
class SimulatedWork(StageWork):
    """Represents the work of a simulated request in a stage.

    ``request_run``: the request that leads; ``stage_run``: its job on a server.
    """

    request_run: RequestRun
    stage_run: StageRun | None = None

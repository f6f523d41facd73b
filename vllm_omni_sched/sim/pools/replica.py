"""Represent one replica of a stage."""

from vllm_omni_sched.resource.pipeline.work_left import WorkLeft
from vllm_omni_sched.sim.pools.request_run import StageRun
from vllm_omni_sched.sim.server import Server


class Replica:
    """Represents a replica of a stage.

    ``server``: None while it is dead or starts. ``stranded``: requests that it had when it died, or got since; it gets
    more until the death is noticed. ``pending_seconds``: sum of the estimates of its requests. ``load``: None if it is
    not needed, or the pipeline core has it.
    """

    __slots__ = ("draining", "in_flight", "index", "load", "pending_seconds", "server", "stranded")

    def __init__(self, index: int, server: Server | None, load: WorkLeft[StageRun] | None = None) -> None:
        self.index = index
        self.server = server
        self.load = load
        self.in_flight = 0
        self.pending_seconds = 0.0
        self.stranded: list[StageRun] = []
        self.draining = False

"""Represent one replica of a stage."""

from vllm_omni_sched.resource.work_left import WorkLeft
from vllm_omni_sched.sim.pools.trip import Leg
from vllm_omni_sched.sim.server import Server


class Replica:
    """A replica of a stage.

    ``server``: None while it is dead or starts. ``limbo``: requests that it had when it died, or got since; it gets
    more until the death is noticed. ``pending_seconds``: sum of the estimates of its requests. ``load``: None if it is
    not needed, or the pipeline core has it.
    """

    __slots__ = ("draining", "in_flight", "index", "limbo", "load", "pending_seconds", "server")

    def __init__(self, index: int, server: Server | None, load: WorkLeft[Leg] | None = None) -> None:
        self.index = index
        self.server = server
        self.load = load
        self.in_flight = 0
        self.pending_seconds = 0.0
        self.limbo: list[Leg] = []
        self.draining = False

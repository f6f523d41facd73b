"""One copy of a stage."""

from vllm_omni_sched.sim.pools.load import Load
from vllm_omni_sched.sim.pools.trip import Leg
from vllm_omni_sched.sim.server import Server


class Replica:
    """One copy of a stage.

    ``server``: None while it is dead or starts. ``limbo``: what it had when it died, and was sent since; until the
    death is noticed it is sent more. ``pending_seconds``: estimates of all that it has. ``load``: None where nobody
    """

    __slots__ = ("draining", "in_flight", "index", "limbo", "load", "pending_seconds", "server")

    def __init__(self, index: int, server: Server | None, load: Load | None = None) -> None:
        self.index = index
        self.server = server
        self.load = load
        self.in_flight = 0
        self.pending_seconds = 0.0
        self.limbo: list[Leg] = []
        self.draining = False

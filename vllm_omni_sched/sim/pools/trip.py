"""Represent a request on its way, and its work in one stage."""

from vllm_omni_sched.core.pipeline.requests import PipelineRequest, StageWork
from vllm_omni_sched.resource.stage_cost import Features
from vllm_omni_sched.sim.server import Job
from vllm_omni_sched.sim.work import Request


class Trip:
    """A request from its arrival until it leaves.

    ``path``: its stages; ``position``: index in the path. ``leg``: its present work on a server or a dead replica.
    ``costs`` and ``features``: by stage, where estimated. ``known``, ``work``: the request, and its present work, as
    the pipeline core knows them. ``answer``: time of the client's first output, and the largest gap after it.
    ``gone``: it has left.
    """

    __slots__ = (
        "answer",
        "attempts",
        "costs",
        "features",
        "gone",
        "known",
        "leg",
        "name",
        "path",
        "position",
        "request",
        "work",
    )

    def __init__(self, request: Request, path: tuple[int, ...]) -> None:
        self.request = request
        self.name = str(request.number)
        self.path = path
        self.position = 0
        self.leg: Leg | None = None
        self.attempts = 0  # dispatches beyond the first in each stage, plus 1
        self.answer = (float("inf"), 0.0)
        self.gone = False
        self.costs: dict[int, float] = {}
        self.features: dict[int, Features] = {}
        self.known: PipelineRequest
        self.work: StageWork

    @property
    def stage(self) -> int:
        """Return the stage where it is or is going."""
        return self.path[self.position]


class Leg(Job):
    """Job of a request in a stage. ``has_output``: whether it has any; ``work``: as the pipeline core knows it."""

    __slots__ = ("has_output", "trip", "work")

    def __init__(self, trip: Trip, stage: int, cost_seconds: float, attempt: int = 0) -> None:
        super().__init__(trip.request, stage, cost_seconds, attempt)
        self.trip = trip
        self.has_output = False
        self.work: StageWork | None = None

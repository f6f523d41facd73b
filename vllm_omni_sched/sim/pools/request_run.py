"""Represent a request on its way through the stages, and its work in one stage."""

from vllm_omni_sched.core.pipeline.requests import PipelineRequest, StageWork
from vllm_omni_sched.resource.pipeline.stage_cost import Features
from vllm_omni_sched.sim.server import Job
from vllm_omni_sched.sim.work import Request


class RequestRun:
    """Represents a request from its arrival until it leaves.

    ``path``: its stages; ``position``: index in the path. ``stage_run``: its work on a server or a dead replica now.
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
        "name",
        "path",
        "position",
        "request",
        "stage_run",
        "work",
    )

    def __init__(self, request: Request, path: tuple[int, ...]) -> None:
        self.request = request
        self.name = str(request.number)
        self.path = path
        self.position = 0
        self.stage_run: StageRun | None = None
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


class StageRun(Job):
    """Represents the job of a request in a stage.

    ``has_output``: whether it has put anything out; ``work``: the job as the pipeline core knows it.
    """

    __slots__ = ("has_output", "request_run", "work")

    def __init__(self, run: RequestRun, stage: int, cost_seconds: float, attempt: int = 0) -> None:
        super().__init__(run.request, stage, cost_seconds, attempt)
        self.request_run = run
        self.has_output = False
        self.work: StageWork | None = None
